"""Programs that state what they compare, and print ratios.

    python -m benchmarks                       every work, 1 and 2 threads, into build/bench.json
    python -m benchmarks --list                the names
    python -m benchmarks --only 'forward*'     some of them (into build/bench-partial.json)
    python -m benchmarks --quick --threads 1   small sizes: shows that it runs, not how fast

A ratio is theirs / ours in time, so above 1 we are faster. The rules, the same for every work:

  1. The sides run in one process and one run, interleaved step by step: A, B, A, B, ...
  2. Both get the same ids and the same number of threads, and run the same number of steps.
  3. Every step uses the next of 16 pre-generated batches; medians over the rounds, after a warm-up.
  4. Ids follow a zipf(1.05) over the resident rows. A static table gets the row number, so its hot rows
     are neighbours; embstore gets that number scattered over int64.
  5. Where a peer can be set up in several ways, the fastest one we found is among those shown.

First comes what the memory of this machine can do, measured on the spot. "of limit" is the time that it
needs for the cache lines and bytes that a work has to move, over the time that we take (machine.py).

To add a work: write a function with @register("name") in a module here, and name the module in PROGRAMS.
"""

PROGRAMS = (
    "static_tables",
    "new_ids",
    "itself",
    "limits",
    "stores",
    "dmp",
    "small_batches",
    "dumps",
    "parameter_server",
    "serving",
    "tfra",
)
