"""Priors out of the files of Slurm and NCCL, and the words for what is wrong with such a file."""

import pytest

from hpctrain.base.errors import FileError, InputError
from hpctrain.records.topology.evidence import Nic, NvlinkPeer, PcieLink
from hpctrain.records.topology.topology import Topology
from hpctrain.topology.formats.nccl import from_nccl, nccl_files
from hpctrain.topology.formats.slurm import from_slurm

DUMP = """\
<system version="1">
  <cpu host_hash="0x1" numaid="0" affinity="ffff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:15:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
      <pci busid="0000:18:00.0" vendor="0x10de" device="0x2330" link_speed="32.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="90" rank="0" gdr="1">
          <nvlink target="0000:05:00.0" count="10" tclass="0x068000"/>
          <nvlink target="0000:06:00.0" count="8" tclass="0x068000"/>
        </gpu>
      </pci>
      <pci busid="0000:19:00.0" class="0x020700" link_speed="32.0 GT/s PCIe" link_width="16">
        <nic>
          <net name="mlx5_0" dev="0" speed="400000" port="1" guid="0xa" maxconn="131072" gdr="1"/>
        </nic>
      </pci>
    </pci>
  </cpu>
  <cpu host_hash="0x1" numaid="1" affinity="ffff0000" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:9a:00.0" vendor="0x10de" device="0x2330" link_speed="16.0 GT/s PCIe" link_width="8">
      <gpu dev="1" sm="90" rank="1" gdr="1">
        <nvlink target="0000:05:00.0" count="18" tclass="0x068000"/>
      </gpu>
    </pci>
    <nic>
      <net name="eth0" dev="1" speed="-1" port="0" guid="0x0" maxconn="65536" gdr="0"/>
    </nic>
  </cpu>
</system>
"""


def imported(text: str, *nodes: str) -> Topology:
    return from_nccl(text, "dump.xml", nodes or ("n1",), 0.0)


def test_a_dump_of_nccl_gives_gpus_nics_and_nominal_rates() -> None:
    prior = imported(DUMP, "n1", "n2")

    assert [node.id for node in prior.nodes] == ["n1", "n2"]
    assert prior.provenance.mode == "prior"
    first, second = prior.nodes[0].devices
    assert (first.id, first.numa, first.pci_path) == ("cuda0", 0, ["0000:15:00.0", "0000:18:00.0"])
    assert first.pcie == PcieLink(generation=5, width=16, generation_max=5, width_max=16)
    assert first.nvlink["0000:05:00.0"] == NvlinkPeer(links=10, active=10)
    assert (second.numa, second.pcie and second.pcie.generation) == (1, 4)
    assert first.flops == {}
    assert first.memory_bytes is None
    assert prior.device_types[first.type].name == "GPU, PCI device 0x10de:0x2330, compute capability 90"
    assert prior.nodes[0].nics == [
        Nic(name="mlx5_0", bytes_per_s=50e9, pci_path=["0000:15:00.0", "0000:19:00.0"], numa=0),
        Nic(name="eth0", numa=1),
    ]
    assert prior.nodes[0].intra_bytes_per_s == 18 * 25e9
    assert Topology.from_json(prior.to_json()) == prior


def test_gpus_that_are_linked_directly_have_the_links_between_them() -> None:
    text = DUMP.replace('target="0000:05:00.0" count="10"', 'target="0000:9a:00.0" count="4"')
    text = text.replace('<nvlink target="0000:06:00.0" count="8" tclass="0x068000"/>', "")
    text = text.replace('target="0000:05:00.0" count="18"', 'target="0000:18:00.0" count="4"')

    node = imported(text).nodes[0]

    assert node.devices[0].nvlink == {"cuda1": NvlinkPeer(links=4, active=4)}
    assert node.intra_bytes_per_s == 4 * 25e9


def test_without_nvlink_the_slowest_pcie_counts_and_an_unknown_one_leaves_it_open() -> None:
    text = "".join(line for line in DUMP.splitlines(keepends=True) if "nvlink" not in line)

    assert imported(text).nodes[0].intra_bytes_per_s == pytest.approx(8 * 16e9 * 128 / 130 / 8)
    assert (
        imported(text.replace('"16.0 GT/s PCIe" link_width="8"', '"" link_width="0"')).nodes[0].intra_bytes_per_s
        is None
    )


def test_what_was_imported_from_nccl_goes_back_to_nccl() -> None:
    prior = imported(DUMP, "n1", "n2", "m1")

    files = nccl_files(prior)

    assert list(files) == ["nccl-n1-and-2-like-it.xml"]
    (text,) = files.values()
    assert text.startswith(
        '<system version="1" name="m1,n[1-2]">\n  <cpu numaid="0">\n    <pci busid="0000:15:00.0">\n'
    )
    assert '<net name="mlx5_0" dev="0" speed="400000"/>' in text
    again = imported(text, "n1")
    devices = [device.model_copy(update={"type": prior.nodes[0].devices[0].type}) for device in again.nodes[0].devices]
    assert devices == prior.nodes[0].devices


def test_nodes_that_differ_get_files_of_their_own() -> None:
    prior = imported(DUMP, "n1", "n2")
    fewer = prior.nodes[1].model_copy(update={"devices": prior.nodes[1].devices[:1]})

    files = nccl_files(prior.model_copy(update={"nodes": [prior.nodes[0], fewer]}))

    assert list(files) == ["nccl-n1.xml", "nccl-n2.xml"]


def test_nvlinks_whose_other_end_has_no_address_are_left_to_nccl() -> None:
    prior = imported(DUMP)
    devices = [
        device.model_copy(update={"nvlink": {"switch": NvlinkPeer(links=18, active=18)}})
        for device in prior.nodes[0].devices
    ]

    (text,) = nccl_files(
        prior.model_copy(update={"nodes": [prior.nodes[0].model_copy(update={"devices": devices})]})
    ).values()

    assert "nvlink" not in text


def test_without_gpus_or_addresses_there_is_no_file_for_nccl() -> None:
    prior = imported(DUMP)
    bare = [device.model_copy(update={"pci_path": None}) for device in prior.nodes[0].devices]

    with pytest.raises(InputError, match="no GPU in this topology"):
        nccl_files(from_slurm("SwitchName=s Nodes=n1", "topology.conf", 0.0))
    with pytest.raises(InputError, match="node n1: cuda0 has no pci_path"):
        nccl_files(prior.model_copy(update={"nodes": [prior.nodes[0].model_copy(update={"devices": bare})]}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "dump.xml:1: not valid XML: no element found"),
        ("<system>\n<cpu>\n</system>", "dump.xml:3: not valid XML: mismatched tag"),
        ('<!DOCTYPE a [<!ENTITY b "c">]>\n<system>&b;</system>', "dump.xml:1: a document type"),
        ("<graphs version='1'/>", "dump.xml:1: found <graphs>; <system> is expected; NCCL_GRAPH_DUMP_FILE writes that"),
        ("<system version='1'/>", "dump.xml:1: there is no <gpu> in it"),
        ("<system>\n<cpu numaid='x'/></system>", "dump.xml:2: <cpu> numaid: found 'x'; a number is expected"),
        ("<system><cpu numaid='0'>\n<gpu dev='0'/></cpu></system>", "dump.xml:2: <gpu> is not inside a <pci>"),
        ("<system><cpu>\n<pci/></cpu></system>", "dump.xml:2: <pci> has no busid"),
        ("<system><pci busid='1'>\n<gpu/></pci></system>", "dump.xml:2: <gpu> has no dev"),
        (
            f"<system><pci busid='1' device='{'9' * 300}'>\n<gpu dev='0'/></pci></system>",
            "dump.xml:2: device and sm of the <gpu> give the type a name of 304 characters; allowed: up to 200",
        ),
        ("<a>" * 100 + "</a>" * 100, "dump.xml:1: nested too deep"),
        (DUMP.replace('dev="1" sm', 'dev="0" sm'), "dump.xml:1: two GPUs have the same `dev`"),
        (DUMP.replace('"0x1" numaid="1"', '"0x2" numaid="1"'), "dump.xml:1: it describes several hosts"),
        (DUMP.replace('count="8"', 'count="0"'), "dump.xml:7: <nvlink> needs a target and a count of 1 or more"),
    ],
)
def test_a_dump_that_cannot_be_used_is_told_with_its_line(text: str, words: str) -> None:
    with pytest.raises(FileError) as error:
        imported(text)

    assert str(error.value).startswith(words)


def test_a_conf_of_slurm_with_comments_case_and_continued_lines() -> None:
    text = (
        "# tree\nswitchname=s0 nodes=n[0-1],m7 LinkSpeed=3\n"
        "SwitchName=s1 \\\n  Nodes = n2, n3 # two\nSwitchName=top Switches=s[0-1]\n"
    )

    prior = from_slurm(text, "topology.conf", 0.0)

    assert [(c.id, c.level, c.parent, sorted(c.members), c.source) for c in prior.fabric.clusters] == [
        ("s0", 1, "top", ["m7", "n0", "n1"], "slurm"),
        ("s1", 1, "top", ["n2", "n3"], "slurm"),
        ("top", 2, None, ["m7", "n0", "n1", "n2", "n3"], "slurm"),
    ]
    assert sorted(node.id for node in prior.nodes) == ["m7", "n0", "n1", "n2", "n3"]
    assert prior.provenance.mode == "prior"


def test_the_default_of_several_topologies_is_taken() -> None:
    text = (
        "- topology: a\n  block:\n    block_sizes: [2]\n    blocks:\n      - {block: b1, nodes: 'n[1-2]'}\n"
        "- topology: b\n  cluster_default: true\n  tree:\n    switches:\n"
        "      - switch: root\n        children: s[1-2]\n      - switch: s1\n        nodes: n[1-2]\n"
        "      - switch: s2\n        nodes: n3\n- topology: c\n  flat: true\n"
    )

    found = {cluster.id: cluster.level for cluster in from_slurm(text, "topology.yaml", 0.0).fabric.clusters}
    other = from_slurm(text.replace("cluster_default: true", "cluster_default: false"), "topology.yaml", 0.0)

    assert found == {"s1": 1, "s2": 1, "root": 2}
    assert [cluster.id for cluster in other.fabric.clusters] == ["b1"]


@pytest.mark.parametrize(
    ("source", "text", "words"),
    [
        ("t.conf", "", "t.conf: there is no switch"),
        ("t.conf", "BlockSizes=4", "t.conf: there is no switch"),
        ("t.conf", "\nSwitchName=a Nodes=n[1-2", "t.conf:2: missing bracket"),
        ("t.conf", "SwitchName=a Knoten=n1", "t.conf:1: found the key 'Knoten'"),
        ("t.conf", "SwitchName=a", "t.conf:1: a has nothing below it"),
        ("t.conf", "SwitchName=a Nodes=n1 Switches=b", "t.conf:1: a has both nodes and switches below it"),
        ("t.conf", "SwitchName=a Nodes", "t.conf:1: found 'Nodes'; Key=Value is expected"),
        ("t.conf", "Nodes=n1", "t.conf:1: the name is missing"),
        ("t.conf", "SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1", "t.conf:2: n1 is on a and on b"),
        ("t.conf", "SwitchName=a Switches=b", "t.conf:1: b below a has no line of its own"),
        ("t.conf", "SwitchName=a Switches=b\nSwitchName=b Switches=a", "t.conf:1: a lies below itself"),
        ("t.conf", "SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2", "t.conf:2: a is given twice"),
        ("t.conf", "SwitchName=a Nodes=n[1-999999999]", "t.conf:1: 'n[1-999999999]' has more than 100000 names"),
        ("t.conf", "SwitchName=a Nodes=@all", "t.conf:1: found '@all'; a node set is expected"),
        ("t.yaml", "a: 1", "t.yaml: a list of topologies is expected"),
        ("t.yaml", "- topology: a\n  flat: true", "t.yaml: no topology of kind tree or block"),
        ("t.yaml", "- topology: a\n  tree: 3", "t.yaml: tree.switches: missing; a list of them is expected"),
        ("t.yaml", "- tree:\n    switches:\n      - switch: s\n        nodes: 3", "t.yaml:3: nodes: found 3"),
        ("t.yaml", "- tree:\n    switches:\n      - 7", "t.yaml:3: found 7; keys are expected"),
        ("t.yaml", "- tree: [", "t.yaml:1: not valid YAML"),
    ],
)
def test_a_file_of_slurm_that_cannot_be_used_is_told_with_its_line(source: str, text: str, words: str) -> None:
    with pytest.raises(FileError) as error:
        from_slurm(text, source, 0.0)

    assert str(error.value).startswith(words)


def test_every_mistake_of_a_conf_is_told_at_once() -> None:
    with pytest.raises(FileError) as error:
        from_slurm("SwitchName=a Nodes=n1\nFoo=1\nSwitchName=b Nodes=n1\n", "t.conf", 0.0)

    assert [mistake.line for mistake in error.value.mistakes] == [2, 3]
