"""What is made of the numbers of a comparison: means, noise, the cheapest, tables and files."""

import csv
import io
import json
import math
from dataclasses import replace

import contest
import pytest

from gradfilter.recipes.comparison import COSTS, frontier
from gradfilter.recipes.contenders import Contender, contenders
from gradfilter.recipes.settings import Settings

KEPT, TIME, MACS, _ = COSTS


def by_name(found) -> dict:
    return {e.contender.name: e for e in found.entries}


def test_contenders_are_every_method_at_every_depth_once():
    found = contenders(["exact", "galerkin:grid=7,bits=8", "exact"], [4, None, 4])
    assert [c.name for c in found] == [
        "exact-last4", "exact-all", "galerkin-grid7-bits8-last4", "galerkin-grid7-bits8-all"
    ]  # fmt: skip
    assert found[2] == Contender("galerkin", (("grid", 7), ("bits", 8)), 4)
    assert found[2].spelled == "galerkin:grid=7,bits=8"
    assert found[2].title == "galerkin grid=7, bits=8" and found[1].depth == "all layers"


def test_a_plan_is_one_contender_whatever_the_depths(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("features.*: {method: galerkin, grid: 7}\n")
    spelled = f"plan:{file}"
    (found,) = contenders([spelled, spelled], [4, None])
    assert (found.spelled, found.title, found.depth) == (spelled, "plan mine", "as planned")
    settings = found.settings(Settings(), 3)
    assert settings.plan == str(file) and settings.seed == 3 and settings.last is None
    before = found.name
    file.write_text("features.*: frozen\n")
    assert found.name == before and before.startswith("plan-mine-")
    (changed,) = contenders([spelled], [4])
    assert changed.name != before and changed.name.startswith("plan-mine-")
    (usual,) = contenders([f"plan:{file.rename(tmp_path / 'plan.yaml')}"], [4])
    assert usual.title == "plan"


def test_plans_of_one_name_are_told_apart(tmp_path):
    for folder, grid in (("a", 7), ("b", 4)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "p.yaml").write_text(f"'*': {{method: galerkin, grid: {grid}}}\n")
    files = [str(tmp_path / folder / "p.yaml") for folder in "ab"]
    found = contenders([f"plan:{file}" for file in files], [None])
    assert [c.title for c in found] == [f"plan {file}" for file in files]


def test_a_plan_that_is_none_is_refused_before_anything_is_trained(tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        contenders([f"plan:{tmp_path / 'nowhere.yaml'}"], [None])
    with pytest.raises(ValueError, match="needs a file, as in plan:plan.yaml"):
        contenders(["plan:"], [None])
    (tmp_path / "bad.yaml").write_text("features.*: {method: galerkn}\n")
    with pytest.raises(ValueError, match=r"bad\.yaml.*galerkin"):
        contenders([f"plan:{tmp_path / 'bad.yaml'}"], [None])


@pytest.mark.parametrize(
    "text, says",
    [
        ("galerkn", "did you mean galerkin?"),
        ("galerkin:gird=7", "galerkin has no gird; it has grid, patch"),
        ("galerkin:grid", "NAME:KNOB=NUMBER"),
        ("galerkin:grid=seven", "NAME:KNOB=NUMBER"),
        ("galerkin:patch=2,grid=7", "not both"),
        ("hosvd:energy=1.5", "energy"),
        ("exact:epochs=3", "exact has no epochs"),
    ],
)
def test_a_method_that_is_none_is_told_by_its_text(text, says):
    with pytest.raises(ValueError, match=says.replace("?", r"\?")) as error:
        contenders([text], [None])
    assert str(error.value).startswith(repr(text))


def test_scores_over_the_seeds():
    e = by_name(contest.comparison())["exact-all"]
    assert e.mean == pytest.approx(0.9) and e.deviation == pytest.approx(0.01)


def test_noise_is_two_standard_errors_of_the_difference():
    found = contest.comparison()
    assert found.reference.contender.name == "exact-all"
    entry = by_name(found)["galerkin-grid7-all"]
    assert found.noise(entry) == pytest.approx(2 * math.sqrt(2 * 0.01**2 / 3))
    assert found.within_noise(entry)
    assert not found.within_noise(by_name(found)["exact-last4"])


def test_the_cheapest_within_noise():
    found = contest.comparison()
    for cost, saving in ((KEPT, 10), (TIME, 200 / 70), (MACS, 3.6)):
        verdict = found.verdict(cost)
        assert verdict.entry.contender.name == "galerkin-grid7-all"
        assert verdict.saving == pytest.approx(saving)
        assert verdict.difference == pytest.approx(-0.005)
    told = str(found.verdict(KEPT))
    assert "least kept memory within noise of exact: galerkin grid=7, all layers, 8 MiB" in told
    assert "(10x less); -0.5 points, where 1.6 pass for equal" in told


def test_a_contender_with_a_failed_run_is_no_answer():
    numbers = contest.NUMBERS | {"galerkin-grid7-all": ([0.89, None, 0.91], 8, 70, 250)}
    found = contest.comparison(numbers)
    assert by_name(found)["galerkin-grid7-all"].mean == pytest.approx(0.9)
    assert found.verdict(KEPT).entry is found.reference
    assert "itself, nothing cheaper" in str(found.verdict(KEPT))
    assert "failed: galerkin grid=7, all layers, seed 1: the loss" in found.table()


def test_a_failed_exact_contender_is_no_reference():
    numbers = contest.NUMBERS | {"exact-all": ([0.95, 0.95, None], 80, 200, 900)}
    assert contest.comparison(numbers).reference.contender.name == "exact-last4"


def test_without_exact_nothing_is_claimed():
    found = contest.comparison(methods=contest.METHODS[1:])
    assert found.reference is None and found.verdicts == []
    assert "no exact run is done to compare with" in found.table()
    assert not any(e["within_noise"] for e in found.to_dict()["entries"])


def test_one_seed_claims_no_noise():
    numbers = {name: (s[:1], *costs) for name, (s, *costs) in contest.NUMBERS.items()}
    found = contest.comparison(numbers)
    assert found.noise(found.entries[0]) == 0.01
    assert "within 1 point of exact:" in str(found.verdict(KEPT))
    assert "noise" not in found.table()


def test_noise_is_at_least_one_test_picture():
    numbers = {name: ([s[0]] * 3, *costs) for name, (s, *costs) in contest.NUMBERS.items()}
    found = contest.comparison(numbers)
    assert found.noise(found.entries[0]) == 1 / 200


def test_frontier():
    assert frontier([(3, 0.5), (1, 0.4), (2, 0.6), (2, 0.3), (4, 0.6)]) == [(1, 0.4), (2, 0.6)]


def test_the_dict_is_json_and_whole():
    found = contest.comparison()
    saved = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert saved["counts"] == {"done": 21, "failed": 3, "started": 0, "waiting": 0}
    entry = next(e for e in saved["entries"] if e["name"] == "galerkin-grid7-all")
    assert entry["costs"]["kept_bytes"] == 8 and entry["costs"]["seconds"] == pytest.approx(70)
    assert entry["measured"]["layers"][0]["weight"]["cosine"] == 0.6
    assert len(entry["runs"]) == 3 and len(entry["runs"][0]["rows"]) == 3
    assert saved["verdicts"][0]["entry"] == "galerkin-grid7-all"


def test_the_lines():
    rows = list(csv.DictReader(io.StringIO(contest.comparison().csv())))
    assert len(rows) == 24
    row = next(r for r in rows if r["method"] == "galerkin:grid=7" and r["last"] == "all")
    assert row["top1"] == "0.885" and row["kept_memory_MiB"] == "8" and row["status"] == "done"
    failed = [r for r in rows if r["status"] == "failed"]
    assert len(failed) == 3 and failed[0]["top1"] == "" and "step 15" in failed[0]["failure"]


def test_the_table_has_a_line_a_contender():
    lines = contest.comparison().table().splitlines()
    assert len(lines) == 1 + 8 + 4 + 3
    assert lines[0].split()[:4] == ["method", "layers", "top1", "%"]
    assert "89.5 ± 1.0" in lines[4] and "3/3" in lines[4]
    assert lines[4].endswith("within noise of exact")
    assert "0/3" in lines[8]


def test_the_plot_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    contest.comparison().plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_name_with_dollars_is_drawn_as_it_is(tmp_path):
    pytest.importorskip("matplotlib")
    found = contest.comparison()
    found.about["data"] = "photos $_{ and $"  # no formula that matplotlib could read
    plan = Contender("plan", (), None, "$_{$.yaml", b"", "$_{$")
    entries = [replace(found.entries[0], contender=plan), *found.entries[1:]]
    replace(found, entries=entries).plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size
