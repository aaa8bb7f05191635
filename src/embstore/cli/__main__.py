"""python -m embstore.cli"""

from embstore.cli import main

main()
