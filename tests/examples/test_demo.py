"""`make demo`, with few steps: what it prints, what it proves, and its report in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from process_groups import run

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FIGURES = ["AUC over time", "Growth", "Hit rate", "Evictions", "Scores", "Miss-ratio curve"]
pytestmark = [pytest.mark.multirank, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The folder of a finished demo, and what it printed into a file."""
    folder = tmp_path_factory.mktemp("demo") / "new"
    command = [sys.executable, "-m", "examples.demo", "--steps", "60", "--capacity", "4096"]
    return folder, run([*command, "--folder", str(folder)], 280, cwd=ROOT)


def test_progress_is_lines_of_80_columns(demo):
    lines = demo[1].splitlines()
    shown = [line for line in lines if "://" not in line and str(demo[0]) not in line]
    assert all(len(line) <= 80 for line in shown), max(shown, key=len)
    assert "\r" not in demo[1] and "\x1b" not in demo[1]
    steps = [line.split() for line in lines if re.match(r" +\d+ +[\d,]+ +[\d.]+% ", line)]
    assert [row[0] for row in steps[:3]] == ["2", "4", "6"] and steps[-1][0] == "60"
    assert all(len(row) == 8 for row in steps[:24]) and all(len(row) == 6 for row in steps[24:])


def test_it_ends_with_a_table_and_says_where_the_report_is(demo):
    folder, output = demo
    names = {"dynamic": "dynamic", "hashing": "hashing trick", "all": "room for all"}
    rows = {
        key: re.search(rf"^{name} +([\d.]+) +([\d,]+) +([\d.]+) MB$", output, re.M)
        for key, name in names.items()
    }
    assert all(0.45 < float(row[1]) < 0.7 for row in rows.values())
    assert float(rows["dynamic"][3]) == pytest.approx(float(rows["hashing"][3]), rel=0.1)
    assert int(rows["dynamic"][2].replace(",", "")) <= 2 * 4096
    assert int(rows["all"][2].replace(",", "")) > 2 * 4096
    assert output.rstrip().endswith(f"report: {folder / 'report.html'}")
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evictions = [row["evictions"] for row in metrics]
    assert evictions == sorted(evictions) and evictions[-1] > 0


def test_a_restart_gives_the_same_rows_and_served_vectors_equal_trained_ones(demo):
    folder, output = demo
    assert "5 steps from the dump give the same rows, bit for bit" in output
    proof = json.loads((folder / "proof.json").read_text())
    ranks = [np.load(folder / f"trained-{rank}.npz") for rank in (0, 1)]
    trained = sum(len(rows[f"{name}.keys"]) for rows in ranks for name in ("user", "item"))
    assert proof["equal"] == proof["trained"] == proof["served"] == trained > 0
    assert proof["state"] == output.count("increment ") > 0


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "mine").touch()
    command = [sys.executable, "-m", "examples.demo", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "--folder should be new" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


PROBE = """<script>
const place = svg => ['x', 'y', 'width', 'height'].map(side => Math.round(svg.getBoundingClientRect()[side]));
const places = () => [...document.querySelectorAll('figure')].map(
  f => [f.querySelector('h2').textContent, ...place(f.querySelector('figure > svg'))]);
onload = () => document.body.setAttribute('places', JSON.stringify(places()));
</script>"""


def browse(page, profile, *options):
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={profile}", "--enable-logging=stderr", "--window-size=1280,1700", *options, f"file://{page}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_report_shows_its_plots_in_both_themes(demo, tmp_path):
    page = demo[0] / "report.html"
    text = page.read_text()
    assert "<script" not in text and "http" not in text  # one page, from nowhere else
    (tmp_path / "probed.html").write_text(text.replace("</body>", f"{PROBE}</body>"))
    dom = browse(tmp_path / "probed.html", tmp_path / "profile", "--dump-dom")
    places = json.loads(re.search(r'places="(.*?)"', dom)[1].replace("&quot;", '"'))
    assert [name for name, *_ in places] == FIGURES
    colours = {theme: re.findall(r"--(page|a|b|soft): (#\w+)", part) for theme, part in zip(
        ("light", "dark"), text.split("@media (prefers-color-scheme: dark)")[:2])}  # fmt: skip
    for theme, number in (("light", 1), ("dark", 0)):
        shot = tmp_path / f"{theme}.png"
        browse(
            page,
            tmp_path / "profile",
            f"--blink-settings=preferredColorScheme={number}",
            f"--screenshot={shot}",
        )
        picture = np.round(matplotlib.image.imread(shot)[:, :, :3] * 255).astype(int)
        rgb = {
            name: np.array([int(value.lstrip("#").ljust(6, "f")[i : i + 2], 16) for i in (0, 2, 4)])
            for name, value in colours[theme]
        }
        np.testing.assert_array_equal(picture[2, 2], rgb["page"])
        for name, x, y, width, height in places:
            plot = picture[y : y + height, x : x + width]
            assert plot.shape[:2] == (height, width), name  # inside of the screenshot
            near = {key: int((np.abs(plot - colour).max(2) < 40).sum()) for key, colour in rgb.items()}
            curve = "b" if name == "Evictions" else "a"
            assert near[curve] > 300 and near["soft"] > 100, (theme, name, near)
