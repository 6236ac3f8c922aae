"""Clusters in one line: names as people and drivers write them, counts, nodes, slots, and what is refused."""

from __future__ import annotations

import json

import pytest

from ds_hetero.cli import main
from ds_hetero.cluster import CATALOGUE, cluster_from_dict, load_cluster
from ds_hetero.cluster.names import card_named, catalogue_name
from ds_hetero.cluster.notation import network_gb_per_s, read_notation
from ds_hetero.cluster.remarks import device_remarks
from ds_hetero.errors import ClusterError

SPELLINGS = {
    "RTX-5090": ("5090", "RTX 5090", "NVIDIA GeForce RTX 5090"),
    "RTX-5070Ti": ("5070ti", "rtx-5070-ti", "GeForce RTX 5070 Ti"),
    "RTX-4090": ("4090", "rtx4090", "nvidia rtx 4090 24gb"),
    "RTX-4070TiSuper": ("4070 ti super", "RTX4070TiSuper", "rtx_4070_ti_super"),
    "RTX-3090": ("3090", "RTX-3090", "geforce rtx 3090"),
    "RTX-3080-10GB": ("3080", "rtx 3080 10GB", "RTX-3080-10GB"),
    "RTX-2080Ti": ("2080ti", "RTX 2080 Ti", "geforce 2080 ti 11gb"),
    "Titan-RTX": ("titan rtx", "TITAN RTX", "NVIDIA TITAN RTX"),
    "RTX-A6000": ("a6000", "RTX A6000", "NVIDIA RTX A6000 48GB"),
    "RTX-6000-Ada": ("6000 ada", "rtx6000ada", "NVIDIA RTX 6000 Ada Generation"),
    "RTX-PRO-6000": ("pro 6000", "RTX PRO 6000 Blackwell", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
    "A100-SXM-80GB": ("a100-80gb", "A100", "NVIDIA A100-SXM4-80GB"),
    "A100-PCIe-80GB": ("A100 80GB PCIe", "a100-pcie-80g", "NVIDIA A100 80GB PCIe"),
    "H100-SXM-80GB": ("h100", "H100 SXM5", "NVIDIA H100 80GB HBM3"),
    "H100-NVL-94GB": ("h100 nvl", "H100-94GB", "NVIDIA H100 NVL"),
    "V100-SXM-32GB": ("v100-sxm2-32gb", "V100 SXM 32 GB", "Tesla V100-SXM2-32GB"),
    "GB200-186GB": ("gb200", "GB200 NVL72", "NVIDIA GB200"),
    "MI300X": ("mi300x", "AMD MI300X", "AMD Instinct MI300X OAM"),
    "Gaudi-3": ("gaudi3", "Gaudi 3", "Intel Gaudi 3 128GB"),
    "Arc-B580": ("b580", "Arc B580", "Intel Arc B580 12 GB"),
}
NEAR_MISSES = (
    *(
        "4070 Super",
        *("2070", "5060", "4060", "3050", "GTX 1070", "RTX A2000", "A5500", "RTX 4000 Ada", "5090 48GB", "P4", "W6800"),
        *("3070 Ti", "9070 XT"),
        "RTX 4090 Laptop GPU",
        "5090D",
    ),
    *("5090D", "3060 8GB", "2080", "2080 Super", "Titan V"),
    *("titan", "RTX 6000", "Quadro RTX 6000", "A1000", "A100 96GB", "A100 PCIe", "H100 96GB", "H200 NVL"),
    *(
        "H10",
        "V100",
        "V100 64GB",
        "P4",
        "K80",
        "T40",
        "L4S",
        "GB20",
        "MI250",
        "MI300A",
        "gaudi",
        "Arc A770",
        "RX 7900 XT",
    ),
)


def test_twenty_cards_are_understood_in_sixty_spellings():
    assert len(SPELLINGS) == 20 and sum(map(len, SPELLINGS.values())) == 60
    read = {spelling: card_named(spelling).name for spellings in SPELLINGS.values() for spelling in spellings}
    assert read == {spelling: name for name, spellings in SPELLINGS.items() for spelling in spellings}


def test_every_card_is_understood_by_the_name_of_the_catalogue():
    assert {name: card_named(name.lower()).name for name in CATALOGUE} == {name: name for name in CATALOGUE}


@pytest.mark.parametrize("text", NEAR_MISSES)
def test_a_near_miss_is_refused_with_names_to_choose_from(text):
    with pytest.raises(ClusterError) as refused:
        card_named(text)
    message = str(refused.value)
    assert repr(text) in message
    assert sum(name in message for name in CATALOGUE) >= (1 if "this model only as" in message else 2)
    if "nearest" in message:
        names = message.partition("nearest names are ")[2].partition(".")[0].split(", ")
        assert len(names) == len(set(names)) == 3 and set(names) <= set(CATALOGUE)


def test_there_are_forty_near_misses():
    assert len(set(NEAR_MISSES)) == 40


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("4070 Super", "RTX-4080Super"),
        ("rtx509", "RTX-5090"),
        ("mi300", "MI300X"),
        ("H1000", "H100-SXM-80GB"),
    ],
)
def test_the_nearest_names_are_near(text, near):
    with pytest.raises(ClusterError, match=near):
        card_named(text)


@pytest.mark.parametrize(
    "driver", ["NVIDIA GeForce RTX 3050 Ti", "NVIDIA RTX A2000", "NVIDIA A1000", "NVIDIA H200 NVL"]
)
def test_a_device_is_not_taken_for_its_neighbour_by_its_drivers_name(driver):
    assert catalogue_name(driver, 24 * 2**30) is None


def test_memory_decides_where_a_drivers_name_does_not():
    assert catalogue_name("NVIDIA A100-SXM", int(39.4 * 2**30)) == "A100-SXM-40GB"
    assert catalogue_name("Tesla V100-SXM2", 16 * 2**30) == "V100-SXM-16GB"


@pytest.mark.parametrize(
    ("gpus", "network", "ranks"),
    [
        ("5090,3090x2", None, ["RTX-5090", "RTX-3090", "RTX-3090"]),
        ("2x3090, 4090", None, ["RTX-3090", "RTX-3090", "RTX-4090"]),
        ("3 * 4090", None, ["RTX-4090"] * 3),
        ("2xa100-80gb | a100-40gb sxm X 2", "25", ["A100-SXM-80GB"] * 2 + ["A100-SXM-40GB"] * 2),
        ("MI300Xx2", None, ["MI300X"] * 2),
        ("mi250x", None, ["MI250X"] * 2),
        ("2xA16", None, ["A16"] * 8),
    ],
)
def test_counts_and_nodes(gpus, network, ranks):
    cluster = cluster_from_dict(read_notation(gpus, network).content)
    assert [device.name for device in cluster.devices] == ranks
    assert len(cluster.nodes) == gpus.count("|") + 1


@pytest.mark.parametrize(
    ("gpus", "gb_per_s"),
    [
        ("8xH100", 450),  # NVLink
        ("H100 PCIe x2", 64),
        ("A6000,6000 Ada", 32),
        ("5090,3090", 16),  # the older PCIe, and half of it: a GeForce has no peer-to-peer
        ("5090,5090@5x8", 16),  # the narrower slot
        ("2x3090@pcie3.0x4", 2),
        ("3090@5x16,3090", 16),  # a card is no faster than itself
        ("4090x2", 16),
        ("RTX A6000,4090", 16),
        ("H100-SXM-80GB, A100-SXM-80GB", 32),  # no NVLink between them
    ],
)
def test_a_node_is_as_fast_as_what_joins_its_cards(gpus, gb_per_s):
    assert cluster_from_dict(read_notation(gpus).content).link(0, 1).bytes_per_s == gb_per_s * 1e9


@pytest.mark.parametrize(("nics", "shared"), [(None, 25), (2, 50), (4, None)])
def test_cards_of_a_node_share_one_port_unless_more_are_given(nics, shared):
    cluster = cluster_from_dict(read_notation("4xL40S | 2xL40S", "200Gbit/s", nics).content)
    alone = float("inf")
    expected = [alone if shared is None else shared * 1e9, alone if nics in (2, 4) else shared * 1e9]
    assert cluster.nic_bytes_per_s.tolist() == expected


@pytest.mark.parametrize(
    ("text", "gb_per_s"), [("25", 25), ("12.5 GB/s", 12.5), ("200Gbit/s", 25), ("10gbps", 1.25), ("10GbE", 1.25)]
)
def test_a_network_is_in_gigabytes_or_gigabits(text, gb_per_s):
    assert network_gb_per_s("--network", text) == gb_per_s


@pytest.mark.parametrize(
    ("gpus", "network", "message"),
    [
        ("8xH100 | 8xA100", None, "Say what joins them: --network 25"),
        ("8xH100", "25", "--network joins nodes, and --gpus names one"),
        ("5090 | 3090", "fast", "must be a number of GB/s"),
        ("5090 | 3090", "0", "must be greater than 0"),
        ("5090,,3090", None, "has an empty place in '5090,,3090'"),
        ("", None, "has an empty place"),
        ("3090x0", None, "asks for 0 cards"),
        ("2070x2", None, "the catalogue has no card '2070'; the nearest names are"),
        ("GTX 1060", None, "no card 'GTX 1060'; the nearest names are"),
        ("2x7900XT,T4", None, "no card '7900XT'; the nearest names are"),
        ("RX 580", None, "no card 'RX 580'; the nearest names are"),
        ("2xV100", None, "'V100' may be V100-SXM-32GB or V100-SXM-16GB or V100-PCIe-32GB or V100-PCIe-16GB"),
        ("3090@16", None, "the slot behind @ is PCIe generation x lanes"),
        ("3090@4x5", None, "the slot behind @ is PCIe generation x lanes"),
        ("9999999xH100", None, "more than"),
        ("3090," * 5000, None, "longer than"),
    ],
)
def test_a_line_that_is_no_cluster_is_refused_by_name(gpus, network, message):
    with pytest.raises(ClusterError, match=message.replace("|", r"\|")):
        read_notation(gpus, network)


def test_what_was_decided_for_the_user_is_said():
    (remark,) = read_notation("8xA100").remarks
    assert remark.startswith("taken for A100-SXM-80GB, not for A100-SXM-40GB or A100-PCIe-80GB")
    assert read_notation("A16").remarks == ("a card A16 is 4 devices, and so 4 ranks",)
    assert not read_notation("5090,3090x2").remarks


@pytest.mark.parametrize(
    ("network", "said"),
    [
        ("10", ("--network 10 is 10 GB/s, 80 Gbit/s; for 10 Gbit Ethernet write 10GbE",)),
        ("1.25", ("--network 1.25 is 1.25 GB/s, 10 Gbit/s; for 1.25 Gbit Ethernet write 1.25GbE",)),
        ("10GB/s", ()),
        ("10GbE", ()),
    ],
)
def test_a_rate_without_a_unit_is_said_to_be_gigabytes(network, said):
    assert read_notation("4090 | 3090", network).remarks == said


def test_devices_that_this_engine_does_not_run_on_are_said_to_be_for_planning_only():
    def remarks(gpus):
        return device_remarks(cluster_from_dict(read_notation(gpus).content).devices)

    assert not remarks("5090,3090")
    assert remarks("gaudi2x8") == ("this engine does not run on Gaudi-2 (HPU): planning only",)
    assert remarks("Max 1550,B580") == ("this engine does not run on Max-1550, Arc-B580 (XPU): planning only",)
    assert remarks("mi300x,5090")[1] == "ROCM beside CUDA in one job is not supported: planning only"
    assert remarks("mi308x")[-1].startswith("the numbers of MI308X are assumed: no public datasheet")


def test_cards_without_bf16_are_said_to_be_for_fp16_with_the_price_of_bf16():
    devices = cluster_from_dict(read_notation("T4x2,5090").content).devices
    assert device_remarks(devices) == (
        "T4 has no bf16, its figures are those of fp16: in bf16 it computes in fp32, at 8.1 of 65 TFLOP/s at best. "
        "Train such a job in fp16; one in bf16 is refused at its start",
    )
    lacking = {name for name, entry in CATALOGUE.items() if entry.bf16_flops_per_s is not None}
    assert lacking == {name for name, entry in CATALOGUE.items() if "no bf16" in entry.device.source}


def _code(arguments):
    """The exit code of the command."""
    try:
        return main(arguments)
    except SystemExit as end:
        return end.code


def test_plan_takes_a_line_of_cards_and_saves_the_cluster(tmp_path, capsys):
    file = tmp_path / "rig.yaml"
    job = ["--model", "llama-3.2-1b", "--seq-len", "16384", "--json"]
    assert _code(["plan", "--gpus", "5090,3090x2", *job, "--save-cluster", str(file)]) == 0
    from_line = json.loads(capsys.readouterr().out)
    assert [device.name for device in load_cluster(file).devices] == ["RTX-5090", "RTX-3090", "RTX-3090"]
    assert _code(["plan", "--cluster", str(file), *job]) == 0
    assert json.loads(capsys.readouterr().out)["predicted"] == from_line["predicted"]


@pytest.mark.parametrize("command", ["simulate", "compare", "show"])
def test_other_commands_take_it_too(command, tmp_path, capsys):
    extra = {"simulate": ["--schedule", "ring"], "show": ["--out", str(tmp_path / "a.svg")]}.get(command, [])
    job = ["--model", "llama-3.2-1b", "--seq-len", "8192", "--json", *extra]
    assert _code([command, "--gpus", "2x5090 | 3090", "--network", "10Gbit/s", *job]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give either --cluster or --gpus"),
        (["--cluster", "lab", "--gpus", "5090"], "give either --cluster or --gpus"),
        (["--cluster", "lab", "--network", "25"], "belong to --gpus"),
        (["--gpus", "5090", "--save-cluster", "rig.txt"], "--save-cluster must end in .yaml or .json"),
        (["--gpus", "5090", "--save-cluster", "no/such/folder/rig.json"], "--save-cluster"),
        (["--gpus", "2070"], "the nearest names are"),
    ],
)
def test_bad_options_end_with_2_and_one_message(options, message, capsys):
    code = _code(["plan", *options, "--model", "llama-3.2-1b", "--seq-len", "8192"])
    printed = capsys.readouterr()
    assert code == 2 and message in " ".join(printed.err.split()) and not printed.out


def test_the_objective_energy_knows_the_watts_of_new_cards_and_cost_asks_for_prices(capsys):
    job = ["plan", "--gpus", "3060x2", "--model", "qwen3-0.6b", "--seq-len", "1024"]
    job += ["--parallel", "full", "--global-batch", "4", "--json", "--objective"]
    assert _code([*job, "energy"]) == 0
    capsys.readouterr()
    assert _code([*job, "cost"]) == 2
    assert "price_per_hour" in capsys.readouterr().err


def test_a_card_that_its_maker_does_not_sell_is_taken_only_by_its_name():
    assert read_notation("4090").remarks == ()
    assert read_notation("4090 48GB").content["nodes"][0]["device"] == "RTX-4090-48GB"


@pytest.mark.parametrize(
    ("gpus", "counts"),
    [("24xH100", [8, 8, 8]), ("10x3090", [8, 2]), ("6x4090,4x3090", [8, 2]), ("2xgb10", [1, 1]), ("8xA100", [8])],
)
def test_more_cards_than_a_machine_holds_are_several_machines(gpus: str, counts: list[int]) -> None:
    notation = read_notation(gpus, "25" if len(counts) > 1 else None)
    assert [len(node.devices) for node in cluster_from_dict(notation.content).nodes] == counts
    assert bool(notation.assumed) == (len(counts) > 1)
    together = read_notation(gpus, is_one_machine=True)
    assert len(together.content["nodes"]) == 1 and together.assumed == ()


def test_several_machines_of_one_entry_ask_for_their_network() -> None:
    with pytest.raises(ClusterError, match=r"24 cards of one entry are 3 machines of at most 8\). Say what joins"):
        read_notation("24xH100")


@pytest.mark.parametrize("name", ["V100-SXM-32GB", "P100-PCIe-16GB", "P40", "GTX-1080Ti"])
def test_cards_before_turing_name_the_wheel_that_has_their_kernels(name: str) -> None:
    remarks = " ".join(device_remarks([CATALOGUE[name].device]))
    assert f"no kernels for {name}: install torch 2.13 or 2.14 for CUDA 12.6 (cu126)" in remarks
    assert name.startswith("V100") or CATALOGUE[name].device.attention_kernel == "torch"  # Triton needs sm70
    assert "cu126" not in " ".join(device_remarks([CATALOGUE["T4"].device]))
