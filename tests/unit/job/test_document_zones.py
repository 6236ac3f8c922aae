"""Tokens of a batch are counted in the zone of their lane."""

from ds_hetero.job.document_zones import DocumentZones
from ds_hetero.runtime.attention.batch_layout import BatchLayout
from ds_hetero.values.baselines import ring
from ds_hetero.values.placement import Lane, Placement, Rows, TokenMove


def test_shares_of_tokens_by_zone(capsys):
    """Of 20 tokens 10 are cut between units 1 and 2 of two nodes, 4 inside the first node, 6 on one unit."""
    lanes = (
        Lane(members=(1, 2), spans=((0, 10),), tokens=((6, 4),), layout="zigzag"),
        Lane(members=(0, 1), spans=((10, 14),), tokens=((2, 2),), layout="zigzag"),
        Lane(members=(0,), spans=((14, 20),), tokens=((6,),), layout="contiguous"),
    )
    rows = (Rows(0, 1, ((0, 10), (10, 14), (14, 20))),)
    placement = Placement(schedule=ring(3, 4, 4), length=20, rank_tokens=(8, 8, 4), lanes=lanes, rows=rows)
    zones = DocumentZones((0, 0, 1))
    assert zones.take_shares() == {}
    zones.record_batch(BatchLayout(placement=placement.with_moves([TokenMove(0, 2, 3), TokenMove(1, 2, 1)])))
    shares = zones.take_shares()
    assert shares == {"local": 0.3, "node": 0.2, "cluster": 0.5}
    assert zones.take_shares() == {}
    for _ in range(2):
        zones.announce_once(shares)
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("documents: 30% of the tokens lie inside one group of ranks") == 1
    assert "; 4 tokens change ranks before attention and after it" in printed.out + printed.err
