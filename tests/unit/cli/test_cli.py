"""The command line: what machines read, and what bad input gets."""

import json
import shlex
import subprocess
import sys

import click
import pytest
import yaml

from ds_hetero import __version__
from ds_hetero.cli import main
from ds_hetero.cli.app import COMMANDS, app
from ds_hetero.cli.options import TOKENS
from ds_hetero.cluster import CATALOGUE, load_cluster
from ds_hetero.common.reading import config_dir
from ds_hetero.cost.price import price_of
from ds_hetero.models import load_model
from ds_hetero.values.plans import read_plan
from tests.markdown import BLOCKS
from tests.support import ROOT
from tests.unit.without import run_without


def _run(*arguments):
    command = [sys.executable, "-m", "ds_hetero.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_doctor_tells_machines_what_works_here(capsys):
    sizes = ["--world-size", 4, "--num-heads", 10, "--num-kv-heads", 5]
    assert _ended("doctor", "--config", config_dir() / "zero2.json", *sizes, "--json") in (0, None)
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"]
    assert {"torch", "deepspeed", "transformers", "accelerate"} <= {row["name"] for row in report["packages"]}
    assert report["devices"][0]["kernels"]["float32"]["torch"] is None
    (schedule,) = report["section"]["schedules"]
    assert schedule["num_heads"] == 10


def test_doctor_names_what_is_wrong_with_a_section(tmp_path, capsys):
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"heterogeneity": {"schedul": "ring"}}))
    assert _ended("doctor", "--config", config) == 1
    assert 'did you mean "schedule"?' in " ".join(capsys.readouterr().out.split())


def test_doctor_plans_where_devices_and_model_are_known(tmp_path, capsys):
    config = tmp_path / "ds_config.json"
    section = {"cluster": "hexiseq-setting-1", "seq_len": 65536}
    config.write_text(json.dumps({"zero_optimization": {"stage": 3}, "heterogeneity": section}))
    command = ["doctor", "--config", config, "--world-size", 8, "--json"]
    _ended(*command)
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] and not report["section"]["schedules"]
    assert "To see it now, give --model" in report["section"]["decided"]
    _ended(*command, "--model", "llama-3.1-8b", "--checkpointing")
    planned = json.loads(capsys.readouterr().out)["section"]
    (schedule,), (predicted,) = planned["schedules"], planned["predicted"]
    assert sum(len(group["ranks"]) for group in schedule["groups"]) == 8 and predicted["feasible"]
    assert f"{predicted['tokens_per_s']:,.0f} tokens/s" in planned["decided"]


def test_doctor_says_what_only_the_start_of_a_job_can_tell(tmp_path, capsys):
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"heterogeneity": {}}))
    assert _ended("doctor", "--config", config, "--world-size", 4) in (0, None)
    assert '"plan": the ranks are measured at the start of the job' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("out", "dtype", "says"),
    [
        ("cluster.txt", "float32", "must end in .yaml or .json"),
        ("none/cluster.yaml", "float32", "is not a writable folder"),
        ("cluster.yaml", "int8", "must be one of bfloat16"),
    ],
)
def test_profile_refuses_what_it_could_not_write_before_it_measures(tmp_path, out, dtype, says):
    run = _run("profile", "--out", tmp_path / out, "--dtype", dtype)
    assert run.returncode == 2 and says in run.stderr and not run.stdout


def _ended(*arguments):
    """The exit code of a command in this process."""
    try:
        return main([*map(str, arguments)])
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize(
    ("command", "says"),
    [("docter", "there is no command 'docter'; did you mean 'doctor'?"), ("xyzzy", "No such command 'xyzzy'")],
)
def test_an_unknown_command_exits_with_2_and_what_was_probably_meant(command, says, capsys):
    assert _ended(command) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_of_each_what_it_says_itself(name):
    command = app.get_command(click.Context(app), name)
    assert command.name == name and " ".join(command.help.split()) == COMMANDS[name]


def test_listing_the_commands_imports_none_of_them():
    program = (
        "import sys\n"
        "from ds_hetero.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print(*sys.modules, file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert all(f"\n  {name} " in run.stdout for name in COMMANDS)
    assert not {"numpy", "rich", "torch", "ds_hetero.cluster", "ds_hetero.cli.planning.plan"} & set(run.stderr.split())


def test_the_version_is_that_of_the_package(capsys):
    assert _ended("--version") == 0
    assert capsys.readouterr().out == f"ds-hetero {__version__}\n"


SMALL = ("--gpus", "5090,3090", "--model", "qwen3-0.6b")
USUAL = ("--parallel", "sequence", "--zero-stage", "3")  # settings with which nothing is left to search but a schedule


@pytest.mark.parametrize(("text", "tokens"), [("4096", 4096), ("4K", 4096), ("1m", 2**20)])
def test_a_length_may_be_in_units_of_1024_tokens(text, tokens, capsys):
    assert _ended("simulate", *SMALL, "--seq-len", text, "--schedule", "ring", "--json") in (0, 1)
    assert json.loads(capsys.readouterr().out)["predicted"]["tokens_per_s"] > 0
    assert TOKENS.convert(text, None, None) == tokens


@pytest.mark.parametrize("text", ["4Q", "K", "1.5K", ""])
def test_a_length_that_is_none_is_refused_with_examples(text, capsys):
    assert _ended("plan", *SMALL, "--seq-len", text) == 2
    assert "is not a number of tokens, such as 131072, or 128K" in " ".join(capsys.readouterr().err.split())


def test_the_ending_of_out_decides_what_plan_writes(tmp_path, capsys):
    page, file = tmp_path / "plan.html", tmp_path / "plan.json"
    for out in (page, file):
        assert _ended("plan", *SMALL, *USUAL, "--seq-len", "4K", "--out", out) == 0
    assert _ended("report", file, "--out", tmp_path / "report.html") == 0
    assert page.read_text() == (tmp_path / "report.html").read_text()
    assert json.loads(file.read_text())["num_heads"] == 16
    assert _ended("show", "--schedule", file, *SMALL, "--seq-len", "4K", "--out", tmp_path / "show.html") == 0
    assert page.read_text() == (tmp_path / "show.html").read_text()


def test_a_report_counts_other_weights_that_are_trained(tmp_path, capsys):
    file, lora = tmp_path / "plan.json", tmp_path / "lora.json"
    assert _ended("plan", *SMALL, *USUAL, "--seq-len", "4K", "--out", file) == 0
    assert _ended("report", file, "--out", tmp_path / "page.html", "--train", "lora:8") == 0
    scenario = json.loads(file.read_text())
    scenario["scenario"]["workload"]["adapter_rank"] = 8
    lora.write_text(json.dumps(scenario))
    assert _ended("report", lora, "--out", tmp_path / "lora.html") == 0
    assert (tmp_path / "page.html").read_text() == (tmp_path / "lora.html").read_text()
    assert "LoRA of rank 8" in (tmp_path / "page.html").read_text()
    capsys.readouterr()
    assert _ended("report", file, "--out", tmp_path / "page.html", "--train", "dora") == 2
    assert "--train must be full" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("plan", *SMALL, "--seq-len", "4K", "--out", "x.txt"), ".json or .html"),
        (("report", "plan.json", "--out", "x.json"), ".html"),
        (("trace", "plan.json", "--out", "x.html"), ".json"),
    ],
)
def test_other_endings_are_refused_with_those_that_can_be_written(command, says, capsys):
    assert _ended(*command) == 2
    assert f"--out must end in {says}, got '{command[-1]}'" in capsys.readouterr().err


def test_plan_says_what_a_million_tokens_cost_and_bills_idle_cards(tmp_path, capsys):
    rig = tmp_path / "rig.json"
    job = ("plan", *SMALL, *USUAL, "--seq-len", "4K", "--json")
    assert _ended(*job, "--price", "5090=0.5,3090=0.22", "--save-cluster", rig) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["price"]["per_step"] == pytest.approx(0.72 * planned["predicted"]["iteration_s"] / 3600)
    assert planned["price"]["per_million_tokens"] == pytest.approx(planned["price"]["per_step"] * 1e6 / 4096)
    assert [device.price_per_hour for device in load_cluster(rig).devices] == [0.5, 0.22]
    devices = load_cluster(rig).devices
    # Rank 1 is idle, rank 0 computes for 80 % of an hour: (209.5 + 71) TFLOP/s, 575 and 350 W, a quarter of it idle.
    price = price_of(devices, {0: 0.8}, 3600.0, 2_000_000, 1e11)
    assert price.per_million_tokens == pytest.approx(0.36) and price.mfu == pytest.approx(2e17 / 3600 / 280.5e12)
    assert price.joules == pytest.approx(3600 * (575 * 0.85 + 350 * 0.25))
    assert price.lines(1e9) == [
        "training:   1B tokens take 20.8 days; 19.8 % of the peaks (MFU), 576 W on average",
        "energy:     0.288 kWh per million tokens, 288 kWh for 1B; cards alone",
        "price:      0.36 per million tokens, 0.72 per step, 360 for 1B tokens, for all 2 devices, the 1 idle too; "
        "0.25 per million tokens if those are not rented",
    ]
    assert price.to_dict(4e6)["training"] == pytest.approx(
        {"tokens": 4e6, "days": 1 / 12, "price": 1.44, "kwh": 1.1525}
    )
    assert price_of([devices[0], CATALOGUE["T4"].device], {}, 1.0, 1, 1.0).money is None


def test_mfu_of_a_plan_is_what_palm_counts(capsys):
    """Six operations a weight of a product and token, and 12 x heads x head size x length, of which causal half."""
    assert _ended("plan", *SMALL, *USUAL, "--seq-len", "4K", "--json") == 0
    planned = json.loads(capsys.readouterr().out)
    model = load_model(SMALL[SMALL.index("--model") + 1])
    products = model.num_layers * model.layer_parameters + model.hidden_size * model.vocab_size
    norms = 2 * model.num_layers * model.hidden_size
    scores = model.num_layers * 12 * model.num_heads * model.head_dim * 4096 / 2
    peaks = sum(CATALOGUE[f"RTX-{name}"].device.peak_flops_per_s for name in (5090, 3090))
    expected = (6 * products + scores) * planned["predicted"]["tokens_per_s"] / peaks
    assert planned["price"]["mfu"] == pytest.approx(expected, rel=12 * norms / (6 * products))


def test_cards_lists_the_catalogue_and_prints_a_stub_that_a_cluster_file_takes(capsys):
    assert _ended("cards", "--json") == 0
    listed = json.loads(capsys.readouterr().out)["cards"]
    assert [card["name"] for card in listed] == list(CATALOGUE)
    assert listed[0]["peak_tflops"] * 1e12 == CATALOGUE[listed[0]["name"]].device.peak_flops_per_s
    assert _ended("cards", "4090", "Radeon VII") == 1
    printed = capsys.readouterr().out
    assert "RTX-4090" in printed and "no card 'Radeon VII'" in printed
    stub = yaml.safe_load(printed[printed.index("devices:") :])
    nodes = [{"name": "a", "device": "Radeon-VII", "link": {"bandwidth_gb_per_s": 16}}]
    assert load_cluster({"nodes": nodes, **stub}).devices[0].peak_flops_per_s == 100e12


@pytest.mark.parametrize("command", ["plan", "fit", "compare"])
def test_every_answer_says_what_it_assumes(command, capsys):
    cards = ("--gpus", "2x4090 | 2x4090", "--network", "10GbE", "--model", "llama-3.2-1b", "--seq-len", "4K")
    assert _ended(command, *cards, *(USUAL if command == "plan" else ())) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("assumed: ")]
    assert "share 1.25 GB/s of network" in line and "through the host's memory" in line and "the whole loss" in line


@pytest.mark.parametrize(("stage", "of_rank_0"), [("1", 2), ("3", 0)])
def test_fit_says_what_saves_of_an_elastic_job_take_of_the_hosts(stage, of_rank_0, capsys):
    cards = ("--gpus", "4090 | 4090", "--network", "10GbE", "--model", "llama-3.2-1b", "--seq-len", "4K")
    assert _ended("fit", *cards, "--zero-stage", stage, "--elastic", "1", "--json") in (0, 1)
    saves = json.loads(capsys.readouterr().out)["saves"]
    count = load_model("llama-3.2-1b").num_parameters
    # Master weights and two moments of Adam of a half each, and on rank 0 bf16 weights besides, where they are whole.
    assert saves["part_bytes"] == [6 * count + of_rank_0 * count, 6 * count]
    total = 2 * sum(saves["part_bytes"])  # two slots of the own part, and two of the other's copy
    assert list(saves["shared_memory_bytes"].values()) == [total, total]
    _ended("fit", *cards, "--zero-stage", stage, "--elastic", "1")
    assert "an elastic job with 1 copy of each part takes" in capsys.readouterr().out


def test_plan_that_does_not_fit_names_the_line_of_fit_which_runs(capsys):
    job = ("--gpus", "3090x2", "--model", "Qwen/Qwen3-8B", "--seq-len", "4K", "--no-checkpointing")
    assert _ended("plan", *job, "--layout", "zigzag") == 2
    message = capsys.readouterr().err
    line = message[message.index("ds-hetero fit") :].split()
    assert line[2:] == ["--gpus", "3090x2", "--model", "Qwen/Qwen3-8B", "--seq-len", "4096", "--no-checkpointing"]
    assert "optimizer offload" in message and _ended(*line[1:], "--json") == 1
    assert json.loads(capsys.readouterr().out)["advice"][0]["fits"]


HOME = ["--gpus", "4x4090 | 2x3090", "--network", "10GbE", "--tiled-loss", "--tiled-mlp"]


def test_plan_names_no_other_offload_where_the_hosts_memory_is_short(capsys):
    offload = ["--offload-optimizer", "--host-memory", 64, "--model", "llama-3.1-8b", "--seq-len", "8K"]
    assert _ended("plan", *HOME, *USUAL, *offload)
    remedies = capsys.readouterr().err.partition("What would fit or help: ")[2].partition(".")[0]
    assert remedies == "more host memory, LoRA or QLoRA, more or larger devices"


def test_plan_says_what_idle_ranks_hold(capsys):
    assert not _ended("plan", *HOME, *USUAL, "--model", "llama-3.2-3b", "--seq-len", "128K")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("idle:")]
    assert line.startswith("idle:       4-5 compute nothing") and line.endswith("GiB for its part of the model states")


def test_plan_says_each_refusal_of_a_uniform_schedule_once(capsys):
    cards = ("--gpus", "4090,3090,3060", "--model", "llama-3.1-8b", "--train", "lora", "--tiled-loss", "--tiled-mlp")
    assert _ended("plan", *cards, *USUAL, "--seq-len", "64K") == 0
    printed = capsys.readouterr().out
    assert "Against uniform schedules" not in printed  # none of them can be
    for reason in (
        "does not fit: rank 2 (RTX-3060",
        "num_heads=32 is not a multiple of 3",
        "no number between 1 and 3",
    ):
        assert printed.count(reason) == 1


@pytest.mark.parametrize(
    ("price", "says"),
    [
        ("4090=1", "--price: '4090' is not a device of the cluster, which has RTX-5090, RTX-3090"),
        ("5090", "must list cards with the price of an hour of one card, such as 5090=0.5"),
        ("5090=1,rtx5090=2", "--price names RTX-5090 twice"),
        ("5090=-1", "--price RTX-5090 must be at least 0"),
    ],
)
def test_a_price_that_is_none_is_refused(price, says, capsys):
    assert _ended("plan", *SMALL, "--seq-len", "4K", "--price", price) == 2
    assert says in capsys.readouterr().err


def test_a_price_for_several_devices_asks_for_one_of_them(capsys):
    cards = ("--gpus", "h100-nvl-94gb,h100-pcie-80gb", "--model", "qwen3-0.6b")
    assert _ended("plan", *cards, "--seq-len", "4K", "--price", "H100=2") == 2
    says = "--price: 'H100' matches several devices: H100-NVL-94GB, H100-PCIe-80GB. Name one of them."
    assert says in " ".join(capsys.readouterr().err.split())


def test_plan_and_simulate_keep_the_contract(tmp_path):
    cluster = config_dir() / "clusters" / "hexiseq-setting-1.yaml"
    job = ["--cluster", cluster, "--model", "gpt-7b", "--seq-len", 65536]
    run = _run("plan", *job, *USUAL, "--json")
    assert run.returncode == 0, run.stderr
    plan = json.loads(run.stdout)
    assert {"schedule", "search_s", "predicted", "baselines"} <= set(plan)
    assert set(plan["baselines"]) >= {"ulysses", "ring", "usp"}
    predicted = {"block_s", "iteration_s", "tokens_per_s", "terms", "memory_bytes"}
    assert predicted <= set(plan["predicted"])
    assert {"non_attention_s", "all_to_all_s", "ring_steps_s"} <= set(plan["predicted"]["terms"])
    known = [b["block_s"] for b in plan["baselines"].values() if b and "block_s" in b]
    assert plan["predicted"]["block_s"] <= min(known)

    schedule = tmp_path / "schedule.json"
    schedule.write_text(json.dumps(plan["schedule"]))
    again = _run("simulate", "--schedule", schedule, *job, "--json")
    assert again.returncode == 0, again.stderr
    assert predicted <= set(json.loads(again.stdout)) | set(json.loads(again.stdout).get("predicted", {}))


# What `ds-hetero plan` may load, beside the standard library: half of what a small plan takes is starting.
PLAN_LOADS = {"click", "numpy"}
PLAN_LOADS_OF_OURS = {"batch", "cli", "cluster", "common", "cost", "errors", "models", "planner", "reporting", "values"}
PLAN_LEAVES = {
    "numpy.ma",
    "numpy.testing",
    "ds_hetero.planner.exact",
    "ds_hetero.planner.pipelines",
    "ds_hetero.planner.published",
    "ds_hetero.reporting.html",
}


def test_plan_for_machines_loads_only_what_it_needs():
    program = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "from ds_hetero.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print(*sorted(set(sys.modules) - before), file=sys.stderr)"
    )
    options = ("--gpus", "5090,3090x2", "--model", "llama-3.2-1b", "--seq-len", "16384", *USUAL, "--json")
    run = subprocess.run([sys.executable, "-c", program, "plan", *options], capture_output=True, text=True, timeout=300)
    assert json.loads(run.stdout)["schedule"]
    loaded = run.stderr.split()
    packages = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names
    assert packages == PLAN_LOADS | {"ds_hetero"}
    assert {name.split(".")[1] for name in loaded if name.startswith("ds_hetero.")} <= PLAN_LOADS_OF_OURS
    assert not PLAN_LEAVES & set(loaded)


def test_planning_commands_run_without_any_training_framework(tmp_path):
    program = (
        "from ds_hetero.cli import main\n"
        "import json\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    try: main(arguments)\n"
        "    except SystemExit as end: assert not end.code, arguments\n"
        "print(main(['profile', '--out', 'cluster.yaml']))\n"
    )
    model = ["--model", "gpt-7b", "--seq-len", "8192", "--json"]
    job = ["--cluster", "hexiseq-setting-1", *model]
    commands = [
        ["plan", *job],
        ["simulate", "--schedule", "ring", *job],
        ["compare", *job],
        ["show", "--out", str(tmp_path / "plan.svg"), *job],
        ["replicas", "--cluster", "hexiseq-setting-1", "--global-batch", "4", *job],
    ]
    run = run_without(("torch", "deepspeed", "transformers", "accelerate"), program, json.dumps(commands))
    *reports, profile_exit = run.stdout.splitlines()
    assert [bool(json.loads(report)) for report in reports] == [True] * len(commands)
    assert (tmp_path / "plan.svg").stat().st_size > 1000
    assert profile_exit == "2"
    assert "ds-hetero profile needs torch; not installed: torch." in run.stderr


def test_bad_input_exits_with_2_and_one_message(tmp_path):
    cluster = tmp_path / "cluster.json"
    node = {"name": "a", "device": "H1000", "count": 8, "link": {"bandwidth_gb_per_s": 1, "latency_us": 1}}
    cluster.write_text(json.dumps({"nodes": [node], "network": {"bandwidth_gb_per_s": 1, "latency_us": 1}}))
    run = _run("plan", "--cluster", cluster, "--model", "gpt-7b", "--seq-len", 65536)
    assert run.returncode == 2
    assert "H1000" in run.stderr
    assert not run.stdout


def test_impossible_options_and_links_exit_with_2_and_one_message(tmp_path, capsys):
    link = {"bandwidth_gb_per_s": 1, "latency_us": 1}
    node = {"name": "a", "device": "L40S", "count": 2, "link": link}
    for i, (changes, says) in enumerate(
        (
            ({"links": [{"between": ["a", "nowhere"], "bandwidth_gb_per_s": 3}]}, "there is no node 'nowhere'"),
            ({"network": {**link, "bandwidth_gb_per_s": 0}}, "bandwidth_gb_per_s must be greater than 0"),
            ({"nodes": [{**node, "count": -2}]}, "count"),
        )
    ):
        cluster = tmp_path / f"{i}.json"
        cluster.write_text(json.dumps({"nodes": [node], "network": link, **changes}))
        _assert_refused(capsys, ["plan", "--cluster", cluster, "--model", "gpt-7b", "--seq-len", 4096], says)
    job = ["--cluster", "hexiseq-setting-1", "--model", "gpt-7b"]
    for command, options, says in (
        ("plan", ["--seq-len", -5], "seq_len must be a whole number >= 1, got -5"),
        ("plan", ["--seq-len", 4], "8 ranks cannot share a sequence of 4 tokens"),
        ("plan", ["--seq-len", 4096, "--out", tmp_path / "none" / "plan.json"], "is not a writable folder"),
        ("show", ["--seq-len", 4096, "--out", tmp_path / "none" / "plan.svg"], "is not a writable folder"),
    ):
        _assert_refused(capsys, [command, *job, *options], says)


def _assert_refused(capsys, arguments, says):
    assert _ended(*arguments) == 2
    out, err = capsys.readouterr()
    assert not out
    assert says in err and "Traceback" not in err and err.count("\n") == 1


def test_replicas_writes_a_file_that_the_section_takes(tmp_path):
    clusters = ["--cluster", "hexiseq-setting-1", "--cluster", "hexiseq-setting-2"]
    job = ["--model", "gpt-7b", "--seq-len", 32768, "--global-batch", 24, "--zero-stage", 1]
    out = tmp_path / "replicas.json"
    run = _run("replicas", *clusters, *job, "--out", out, "--json")
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    plan = read_plan(json.loads(out.read_text()))
    written = json.loads(out.read_text())
    assert told["scenario"] == written.pop("scenario") and told["schedule"] == written
    assert [schedule.sp_size for schedule in plan.schedules] == [8, 12]
    assert told["global_batch"] == plan.batch_split.samples == 24
    predicted = told["predicted"]
    assert max(predicted["busy_s"]) == predicted["step_s"] <= predicted["even_step_s"]
    impossible = _run("replicas", *clusters, *job[:-4], "--global-batch", 1)
    assert impossible.returncode == 2
    assert "cannot make up a global batch of 1" in " ".join(impossible.stderr.split())


def _llama_with(tmp_path, layer_types):
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "vocab_size": 64, **sizes, "layer_types": layer_types}))
    return path


def test_doctor_prints_one_json_object_whatever_frameworks_print_as_they_are_imported(tmp_path):
    run = _run("doctor", "--model", _llama_with(tmp_path, ["full_attention"] * 2), "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["healthy"]


def test_doctor_refuses_what_transformers_refuses(tmp_path, capsys):
    assert _ended("doctor", "--model", _llama_with(tmp_path, ["full_attention"] * 3), "--json") == 2
    messages = capsys.readouterr().err
    assert "ModelError" in messages and "layer_types" in messages and "Traceback" not in messages


def test_the_page_on_launching_shows_every_file_whole(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "launch.md").read_text()
    monkeypatch.chdir(tmp_path)
    for line in next(block for block in BLOCKS if block.page.name == "launch.md").text.splitlines():
        with pytest.raises(SystemExit, match="0"):
            main(shlex.split(line)[1:])
    files = {path.name: path.read_text() for path in (tmp_path / "launch").iterdir()}
    assert set(files) >= {"hostfile", "torchrun.sh", "accelerate.yaml", "slurm.sh", "env.sh"}
    for name, text in files.items():
        assert f"```text\n{text.strip()}\n```" in page, name
        if name.endswith(".sh"):
            subprocess.run(["bash", "-n", f"launch/{name}"], check=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hosts", "a"], "names 1 hosts, and the plan is for 2 nodes"),
        (["--hosts", "a,a"], "two hosts have the same name"),
        (["--hosts", "a,b c"], "as ssh takes them"),
        (["--port", "0"], "not a port number"),
        (["--interface", "eth0; rm"], "not the name of a network interface"),
        (["--out", "missing/folder"], "cannot be written"),
    ],
)
def test_hosts_that_no_launcher_takes_are_refused(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rig = ["--gpus", "2xH100 | A100", "--network", "1", "--model", "llama-3.2-1b", "--seq-len", "32K"]
    with pytest.raises(SystemExit, match="0"):
        main(["plan", *rig, *USUAL, "--out", "p.json"])
    assert main(["launch-files", "p.json", *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_doctor_says_what_is_missing_where_torch_is():
    program = """
import ds_hetero.cli as cli
try:
    cli.main(["doctor"])
except SystemExit as left:
    assert left.code == 1
"""
    run = run_without(["torch"], program)
    assert "torch" in run.stdout and "not healthy" in run.stdout and "ds-hetero[train]" in run.stdout


def test_an_interrupt_outside_of_a_search_ends_with_130_and_one_word(monkeypatch, capsys):
    """Not with 1, which is the answer of ``fit`` for "it does not fit"."""

    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("ds_hetero.cli.app.import_module", interrupted)  # also while a command's module is imported
    assert _ended("fit", "--gpus", "H100", "--model", "llama-3.1-8b", "--seq-len", "8K") == 130
    assert capsys.readouterr().err == "interrupted\n"


_MIXTURE = ("--gpus", "H100 | H100 | A100 | A100", "--network", "25GbE", "--model", "mixtral-8x7b", "--seq-len", "8K")


def test_plan_divides_experts_where_asked_and_says_what_the_other_way_takes(tmp_path, capsys):
    """Weights of 88 GB over 25 Gbit Ethernet take longer than tokens; the folder has the key."""
    command = ["plan", *_MIXTURE, "--train", "lora", "--parallel", "sequence"]
    _ended(*command, "--experts", "best", "--json", "--out", tmp_path / "job")
    answer = json.loads(capsys.readouterr().out)
    assert answer["job"]["settings"]["experts"] == "by_speed"
    config = json.loads((tmp_path / "job" / "ds_config.json").read_text())
    assert config["heterogeneity"]["experts"] == "by_speed" and config["zero_optimization"]["stage"] in (1, 2, 3)
    assert answer["scenario"]["workload"]["experts"] == "by_speed"
    _ended(*command, "--experts", "no", "--json")
    whole = json.loads(capsys.readouterr().out)
    assert whole["job"]["settings"]["experts"] is None
    assert whole["job"]["step_s"] > 2 * answer["job"]["step_s"]
    _ended(*command, "--zero-stage", "1", "--experts", "3,3,1,1", "--json")
    other = json.loads(capsys.readouterr().out)["advice"]["experts"]
    assert other["experts"] is None and other["zero_stage"] == 3 and other["iteration_s"] > 0


def test_experts_that_cannot_be_divided_are_refused(capsys):
    command = ["plan", *_MIXTURE, "--train", "lora"]
    assert _ended(*command, "--experts", "even") == 2
    assert "is neither best, no, equal, by_memory, by_speed, nor weights" in " ".join(capsys.readouterr().err.split())
    assert _ended(*command, "--experts", "equal", "--zero-stage", 0) == 2
    assert "which jobs do under ZeRO 1, 2, 3, not --zero-stage 0" in " ".join(capsys.readouterr().err.split())
