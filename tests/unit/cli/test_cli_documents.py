"""``show --documents``, ``show --sample`` and ``plan --lengths``: what they print, and what bad input gets."""

import json

import pytest

from ds_hetero.cli import main
from ds_hetero.values.plans import read_plan
from ds_hetero.values.schedule import Schedule

WHERE = ["--cluster", "hexiseq-setting-1", "--model", "llama-3.1-8b", "--seq-len", "65536"]


@pytest.fixture
def run(capsys):
    """Run a command; exit code, what it printed, and its messages."""

    def _run(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code
        printed = capsys.readouterr()
        return code or 0, printed.out, printed.err

    return _run


@pytest.fixture
def lengths_file(tmp_path):
    def _write(content):
        path = tmp_path / "lengths.json"
        path.write_text(json.dumps(content))
        return path

    return _write


def test_every_token_of_the_given_documents_is_on_a_rank(run, lengths_file):
    lengths = [30_000, 20_000, 1_000, 5]
    code, out, _ = run("show", "--documents", lengths_file(lengths), "--schedule", "proportional", *WHERE, "--json")
    assert code == 0
    report = json.loads(out)
    assert report["documents"] == lengths and report["length"] == 65536
    assert sum(report["rank_tokens"].values()) == 65536 == sum(report["zone_tokens"].values())
    placed = sorted(j for lane in report["lanes"] for j in lane["documents"] if j is not None)
    assert placed == [0, 1, 2, 3]
    assert {lane["zone"] for lane in report["lanes"]} <= {"cluster", "node", "local"}
    assert report["predicted_s"] <= report["others_s"]["stream"] and report["balance"] >= 0.999
    for lane in report["lanes"]:
        for (start, stop), tokens in zip(lane["spans"], lane["tokens"], strict=True):
            assert sum(tokens) == stop - start


def test_a_sample_prints_tables_and_draws_a_picture(run, tmp_path):
    picture = tmp_path / "documents.png"
    code, out, _ = run("show", "--sample", "arxiv", "--out", picture, *WHERE)
    assert code == 0 and picture.read_bytes().startswith(b"\x89PNG")
    for word in ("Lanes, in the order of the forward", "over ideal", "inside nodes", "between nodes", "stream"):
        assert word in out


def test_the_same_seed_draws_the_same_row(run):
    first, again, other = (run("show", "--sample", "github", "--seed", seed, *WHERE, "--json")[1] for seed in (1, 1, 2))
    assert first == again != other


def test_a_schedule_is_planned_for_a_distribution_and_is_not_slower_than_the_stream(run, lengths_file, tmp_path):
    schedule = tmp_path / "schedule.json"
    lengths = lengths_file({"lengths": [500, 3_000, 12_000, 40_000]})
    code, out, _ = run("plan", "--lengths", lengths, "--out", schedule, *WHERE, "--json")
    assert code == 0
    planned = json.loads(out)
    assert read_plan(json.loads(schedule.read_text())).schedules == (Schedule.from_dict(planned["schedule"]),)
    times = [each["block_s"] for each in planned["candidates"] if each["block_s"]]
    assert planned["predicted"]["block_s"] <= 1.001 * min(times)
    assert planned["predicted"]["block_s"] <= planned["predicted"]["stream_s"]
    code, out, _ = run("show", "--sample", lengths, "--schedule", schedule, *WHERE)
    assert code == 0 and "predicted" in out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["show", "--sample", "arxvi"], "did you mean 'arxiv'?"),
        (["show", "--documents", "nowhere.json"], "cannot read the lengths file 'nowhere.json'"),
        (["show", "--documents", "nowhere.json", "--sample", "arxiv"], "give either --documents FILE or --sample"),
        (["show", "--sample", "arxiv", "--out", "x.html"], "--out must end in .svg or .png"),
        (["show", "--sample", "arxiv", "--cost-model", "published"], "placed under the calibrated cost model"),
        (["show"], "give --out, the picture to write"),
        (["plan", "--lengths", "arxiv", "--token-unit", "64"], "--lengths chooses layouts and tokens itself"),
        (["plan", "--lengths", "nothing"], "is neither a file of lengths nor a distribution"),
    ],
)
def test_bad_options_exit_with_2_and_one_message(run, options, says):
    code, _, err = run(*options, *WHERE)
    assert code == 2 and says in " ".join(err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([0], "length 0 must be"),
        ([5, "x"], "length 1 must be"),
        ([], "must hold a list of 1 to 100,000 lengths"),
        ({"length": [1]}, "must hold a list"),
        ([70_000], "1 documents have 70,000 tokens together, the row has 65,536"),
    ],
)
def test_lengths_that_make_no_sense_exit_with_2_and_one_message(run, lengths_file, content, says):
    code, _, err = run("show", "--documents", lengths_file(content), *WHERE)
    assert code == 2 and says in err


def test_documents_longer_than_all_memory_are_refused_with_the_limits(run):
    where = ["--cluster", "hexiseq-setting-1", "--model", "llama-3.1-8b", "--seq-len", str(2**24)]
    code, _, err = run("show", "--sample", "arxiv", "--schedule", "proportional", "--no-checkpointing", *where)
    assert code == 2 and "a batch row of 16,777,216 tokens does not fit" in err and "by unit" in err
