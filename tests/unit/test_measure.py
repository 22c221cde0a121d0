"""The demo's parts that need no second process: numbers from samples, intervals, the model, the text, the options."""

import ast
import inspect

import pytest
import torch
import torch.distributed as dist

from torchweave.cli.main import main
from torchweave.errors import TorchweaveError, UsageError
from torchweave.measure import dense, dropless, language, launch, moe, routing
from torchweave.measure.hidden import Profile, hidden_share_from_log, is_communication
from torchweave.measure.lane_cpu import LinkLog, Transfer
from torchweave.measure.pair_times import PairBench, summarize
from torchweave.measure.text import Batches, python_text

pytestmark = pytest.mark.timeout(60)


def samples(serial, woven, compute, communication):
    return {
        "serial": [serial] * 3,
        "woven": [woven] * 3,
        "compute": [compute] * 3,
        "communication": [communication] * 3,
    }


def test_the_bound_recovers_everything_and_serial_nothing():
    times = summarize(samples(150.0, 100.0, 100.0, 50.0), [Profile(1.0, None), Profile(0.5, None)])
    assert (times.bound_ms, times.recovered_share, times.hidden_share) == (100.0, 1.0, 0.75)
    assert summarize(samples(150.0, 150.0, 100.0, 50.0), []).recovered_share == 0.0
    assert summarize(samples(150.0, 125.0, 50.0, 100.0), []).recovered_share == 0.5
    assert times.spread["serial"] == (150.0, 150.0)


def test_nothing_can_be_recovered_where_serial_is_the_bound():
    times = summarize(samples(100.0, 90.0, 100.0, 0.0), [])
    assert times.recovered_share is None
    assert times.hidden_share is None


def test_medians_shrug_at_one_slow_round():
    slow = samples(150.0, 100.0, 100.0, 50.0)
    slow["woven"] = [100.0, 900.0, 100.0]
    assert summarize(slow, []).woven_ms == 100.0


def log(*spans, waits=()):
    return LinkLog([Transfer(begin, begin, end, "alltoall_base_", 1) for begin, end in spans], list(waits))


def test_hidden_is_what_runs_together_with_computation():
    assert hidden_share_from_log(log((0, 10), (20, 30)), [(0, 5), (25, 40)]) == 0.5
    assert hidden_share_from_log(log((0, 10), (5, 20)), [(0, 20)]) == 1.0
    assert hidden_share_from_log(log(), [(0, 5)]) is None


def test_without_segments_hidden_is_what_nobody_waits_for():
    assert hidden_share_from_log(log((0, 10), waits=[(8, 12)]), None) == 0.8
    assert hidden_share_from_log(log((0, 10), waits=[(0, 12)]), None) == 0.0


def test_kernels_are_told_apart_by_name():
    assert is_communication("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)")
    assert is_communication("torchweave_link")
    assert not is_communication("nvjet_tst_256x128_64x4_1x2_h_bz_TNT")


@pytest.mark.parametrize("module", [language, routing, moe, dropless, dense])
def test_the_models_know_nothing_of_overlap(module):
    """Catches a model that is written for what it has to show."""
    imported = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    allowed = {"torchweave.errors", *(f"torchweave.measure.{name}" for name in ("language", "moe", "routing", "sizes"))}
    assert {name for name in imported if name.startswith("torchweave")} <= allowed


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def small_model(group, **kwargs):
    sizes = moe.ModelSizes(layers=2, hidden=64, ffn=32, experts_per_rank=4, top_k=2, sequence=16, **kwargs)
    return moe.MoeLanguageModel(sizes, group, dtype=torch.float64, device=torch.device("cpu"))


@pytest.mark.parametrize("capacity_factor", [0.5, 4.0])
def test_gradients_of_dispatch_and_combine(group, capacity_factor):
    """Against numerical differences, with dropped tokens and with empty slots."""
    generator = torch.Generator().manual_seed(1)
    expert = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(6)])
    capacity = max(int(12 / 4 * capacity_factor), 1)
    slot_of, kept, choice_of = routing.places(expert, 4, capacity)
    x = torch.randn(6, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.rand(6, 2, dtype=torch.float64, generator=generator, requires_grad=True)

    def mixed(x, weight):
        rows = routing.dispatch(x, slot_of, kept, choice_of)
        return routing.combine(rows.square(), weight * kept, slot_of, choice_of)

    torch.autograd.gradcheck(mixed, (x, weight))


def test_enough_room_is_the_plain_mixture(group):
    """With a slot for every choice, the mixture is the weighted sum of the chosen experts' outputs."""
    model = small_model(group, capacity_factor=4.0)
    mixture = model.layers[0].mixture
    x = torch.randn(16, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    weight, expert = torch.topk((x @ mixture.router).float().softmax(-1), 2)
    rows = x.expand(4, 16, 64)
    every = mixture.experts(rows)
    plain = sum(weight[:, k : k + 1] * every[expert[:, k], torch.arange(16)] for k in range(2))
    torch.testing.assert_close(mixture(x), plain, rtol=1e-6, atol=1e-6)  # the router's weights are float32


def test_a_dropless_mixture_is_the_plain_mixture(group):
    """Catches rows that come back to other tokens, forward or backward."""
    sizes = moe.ModelSizes(layers=1, hidden=64, ffn=32, experts_per_rank=4, top_k=2, sequence=16)
    generator = torch.Generator().manual_seed(3)
    mixture = dropless.DroplessMixture(sizes, group, generator, generator).double()
    x = torch.randn(16, 64, dtype=torch.float64, generator=generator, requires_grad=True)

    def plain(x):
        weight, expert = torch.topk((x @ mixture.router).float().softmax(-1), 2)
        every = torch.stack([make(x) for make in mixture.experts])
        return sum(weight[:, k : k + 1] * every[expert[:, k], torch.arange(16)] for k in range(2))

    for run in (mixture, plain):
        x.grad = None
        mixture.zero_grad()
        run(x).square().sum().backward()
        found = [x.grad, *(parameter.grad for parameter in mixture.parameters())]
        if run is mixture:
            expected = found
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_dense_model_alone_is_the_one_of_a_group_of_one(group):
    """Catches an all-reduce in the wrong place of forward or backward."""
    sizes = dense.DenseSizes(layers=2, hidden=64, ffn=96, sequence=16)
    text = Batches(python_text(1 << 16), 4, 16, 0, torch.device("cpu")).next()
    grads = []
    for where in (group, None):
        model = dense.DenseLanguageModel(sizes, where, dtype=torch.float64, device=torch.device("cpu"))
        model.loss(text).backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))
    with pytest.raises(UsageError, match="divides attention heads"):
        dense.DenseLanguageModel(
            dense.DenseSizes(1, 64 + 32, 96, 16), group, dtype=torch.float64, device=torch.device("cpu")
        )


def test_the_model_learns(group):
    model = small_model(group, capacity_factor=2.0)
    batches = Batches(python_text(1 << 16), 4, 16, 0, torch.device("cpu"))
    batch = batches.next()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        loss = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1
    assert len(list(model.parameters())) == len(model.shared_parameters()) + 4


def test_batches_are_text_and_the_same_for_the_same_seed():
    text = python_text(1 << 16)
    one, other = (Batches(text, 2, 32, 5, torch.device("cpu")).next() for _ in range(2))
    assert torch.equal(one, other)
    assert one.shape == (2, 33)
    assert bytes(one[0].tolist()) in bytes(text.tolist())


def test_too_few_rounds_are_refused():
    with pytest.raises(UsageError, match="at least two rounds"):
        PairBench(None, {}, None, None, torch.device("cpu")).run(rounds=1)


@pytest.mark.parametrize(
    "words",
    [
        ["--ranks", "0"],
        ["--layers", "-1"],
        ["--hidden", "100"],
        ["--tokens", "0"],
        ["--steps", "-1"],
        ["--link-gbps", "-1"],
        ["--link-gbps", "nan"],
        ["--link-sms", "0"],
    ],
)
def test_impossible_options_leave_with_2(words, capsys):
    assert main(["demo", *words]) == 2
    message = capsys.readouterr().err
    assert words[0] in message
    assert "Given:" in message
    assert "Remedy:" in message


def test_a_rank_that_dies_is_named_and_the_others_are_stopped(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1':\n    raise SystemExit(7)\ntime.sleep(600)\n")
    with pytest.raises(TorchweaveError, match=r"rank 1 of 2 ended with exit code 7"):
        launch.start_ranks([], 2, limit_s=30, program=[str(script)])


def test_ranks_that_refuse_their_options_have_told_why_themselves():
    assert launch.start_ranks(["no-such-command"], 2, limit_s=30) == 2


def test_any_program_can_be_started_as_ranks(tmp_path, monkeypatch):
    # torchrun's own words about the ranks that it started would let rank 0 wait for a store that nobody opens
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "assert 'TORCHELASTIC_USE_AGENT_STORE' not in os.environ\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(os.environ['WORLD_SIZE'])\n"
    )
    assert launch.start_ranks([str(tmp_path)], 2, limit_s=30, program=[str(script)]) == 0
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["2", "2"]


def test_ranks_that_do_not_end_are_stopped():
    with pytest.raises(TorchweaveError, match=r"within 0\.1 s"):
        launch.start_ranks(["demo"], 1, limit_s=0.1)
