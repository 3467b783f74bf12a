"""Merging an adapter into its base: the numbers, the files, and the score that decides."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from published import LAYOUTS, publish
from safetensors.torch import load_file, save_file
from tiny import write_tiny_model
from tiny_run import TARGET, tiny_run_recipe
from transformers import AutoModelForCausalLM

from qerl import export_merged as exporting
from qerl.adapter import save_adapter
from qerl.errors import QerlError
from qerl.export import dequantized_base
from qerl.export_merged import Loss, LossError, export_merged, worst_layers
from qerl.merge import Delta, Merge
from qerl.quantize.search import round_to
from qerl.requantize import gather, live_packed, output_error, requantize
from qerl.rescore import Score, batches, measure_of, open_session, share_kept
from qerl.run import train
from qerl.run_folder import RunFolder
from qerl.session import Session
from qerl.types import EvalResult, SamplingParams
from qerl_kernels.quantize import dequantize, quantize_absmax

IDS = torch.tensor([[1, 5, 6, 7, 8, 9, 4, 3, 12, 11]])

PARTS = ("packed", "scale", "global_scale")

REWARD = f"""
def right(completion_ids, **_):
    return [float(ids[0] == {TARGET}) for ids in completion_ids]
"""


def train_tiny(root: Path, model: Path, **changes) -> Path:
    """A run that has learnt its task: none of the held-out prompts right before, all after."""
    (root / "reward.py").write_text(REWARD)
    recipe = tiny_run_recipe(
        model,
        root,
        task__reward=f"{root}/reward.py:right",
        train={"steps": 10, "lr": 8e-3, "lr_schedule": "constant"},
        eval__prompts=12,
        noise__schedule="off",
        rollout={"prompts_per_step": 4, "group_size": 8, "max_completion_tokens": 2},
        **changes,
    )
    with train(recipe, report=False) as run:
        assert run.summary["before"]["accuracy"] == 0 and run.summary["after"]["accuracy"] == 1
        return run.folder.path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers, 16 bits."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "small", num_hidden_layers=2)


@pytest.fixture(scope="module")
def trained(small: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run on an NVFP4 base, and that base's checkpoint."""
    run = train_tiny(tmp_path_factory.mktemp("trained"), small)
    session = open_session(RunFolder.open(run))
    checkpoint = session.policy.base.checkpoint
    session.close()
    return SimpleNamespace(run=run, checkpoint=checkpoint, adapter=run / "adapter")


@pytest.fixture(scope="module")
def bf16(trained: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory):
    return export_merged(trained.run, tmp_path_factory.mktemp("bf16") / "made", method="bf16")


@pytest.fixture(scope="module")
def nvfp4(trained: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory):
    return export_merged(trained.run, tmp_path_factory.mktemp("nvfp4") / "made", method="nvfp4")


def make_adapter(base: Path, folder: Path, targets: list[str], scale: float = 0.1, **options):
    """Save a random adapter for a 16-bit folder; returns the model that holds it."""
    network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(r=4, lora_alpha=10, target_modules=targets, **options)
    model = get_peft_model(network, config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = scale * torch.randn(parameter.shape, generator=generator)
    save_adapter(model, folder, base_model="me/base")
    return model


def logits(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    """What plain transformers (and peft) compute from a folder, in fp32, once it is unpacked."""
    if "quantization_config" in json.loads((folder / "config.json").read_text()):
        plain = folder.with_name(f"{folder.name}-plain")
        folder = dequantized_base(folder, plain, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    with torch.no_grad():
        return model.eval()(IDS).logits


def unpacked(stored: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The fp32 weight of a packed layer."""
    codes, scale, divisor = (stored[f"{name}.weight_{part}"] for part in PARTS)
    return dequantize(codes, scale, divisor)


def plain_base(trained: SimpleNamespace, folder: Path) -> Path:
    return dequantized_base(trained.checkpoint, folder, dtype=torch.float32)


# ------------------------------------------------------------------------------------- the delta


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"up_proj": 2}, "alpha_pattern": {"layers.1.self_attn.q_proj": 24}},
        {"use_rslora": True, "rank_pattern": {"q_proj": 7}, "alpha_pattern": {"q_proj": 5}},
    ],
)
def test_the_delta_is_pefts_own(small: Path, tmp_path: Path, options: dict):
    model = make_adapter(small, tmp_path / "adapter", ["q_proj", "up_proj"], **options)
    delta = Delta(tmp_path / "adapter")
    assert len(delta.modules) == 4 and not delta.is_zero()
    for name in delta.modules:
        layer: Any = model.get_base_model().get_submodule(name)
        torch.testing.assert_close(delta.of(name), layer.get_delta_weight("default"))


def test_an_adapter_that_is_no_pair_or_no_lora_is_refused(trained: SimpleNamespace, tmp_path: Path):
    folder = tmp_path / "adapter"
    shutil.copytree(trained.adapter, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in tensors if "lora_B" in name)
    save_file({**tensors, name: torch.zeros(3, 9)}, folder / "adapter_model.safetensors")
    with pytest.raises(QerlError, match=r"damaged: lora_A .* and lora_B \[3, 9\] of .* no pair"):
        Delta(folder).of(name.removeprefix("base_model.model.").removesuffix(".lora_B.weight"))
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(QerlError, match="DoRA"):
        Delta(folder)


# ------------------------------------------------------------------------------------------ bf16


def test_bf16_is_base_plus_delta_rounded_once(trained: SimpleNamespace, bf16):
    made = load_file(bf16.path / "model.safetensors")
    stored = load_file(trained.checkpoint / "model.safetensors")
    delta = Delta(trained.adapter)
    assert len(delta.modules) == 14
    for name in delta.modules:
        wanted = (unpacked(stored, name) + delta.of(name)).bfloat16()
        assert torch.equal(made.pop(f"{name}.weight"), wanted), name
    for name, tensor in made.items():
        assert torch.equal(tensor, stored[name]), name
    assert "lm_head.weight" in made and "model.embed_tokens.weight" in made


def test_bf16_is_a_plain_checkpoint_that_acts_as_the_adapter(
    trained: SimpleNamespace, bf16, tmp_path: Path
):
    config = json.loads((bf16.path / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    base = plain_base(trained, tmp_path / "base")
    adapter, merged = logits(base, trained.adapter), logits(bf16.path)
    moved = (adapter - logits(base)).abs().max()
    assert moved > 1
    assert (merged - adapter).abs().max() < 0.02 * moved


def test_the_scores_are_the_evaluators(trained: SimpleNamespace, bf16):
    summary = json.loads((trained.run / "summary.json").read_text())
    for score, was in ((bf16.base, summary["before"]), (bf16.adapter, summary["after"])):
        assert json.loads(json.dumps(score.result.as_dict())) == was
    assert bf16.measure == "accuracy" and bf16.share == 1
    assert bf16.adapter.distance == 0 < bf16.export.distance < 0.01 < bf16.base.distance
    assert bf16.bytes == (bf16.path / "model.safetensors").stat().st_size
    assert json.loads(json.dumps(bf16.as_dict()))["share_kept"] == 1


# ----------------------------------------------------------------------------------------- NVFP4


def test_nvfp4_keeps_what_plain_rounding_loses(trained: SimpleNamespace, nvfp4, tmp_path: Path):
    """Logits against the adapter's: nearer than with each merged weight rounded by itself, on
    text that has nothing to do with the run; a large adapter, of which rounding loses little."""
    base = plain_base(trained, tmp_path / "base")
    wanted = logits(base, trained.adapter)
    stored = load_file(trained.checkpoint / "model.safetensors")
    delta = Delta(trained.adapter)
    plain = load_file(base / "model.safetensors")
    for name in delta.modules:
        divisor = stored[f"{name}.weight_global_scale"]
        packed = quantize_absmax(plain[f"{name}.weight"] + delta.of(name), divisor)
        plain[f"{name}.weight"] = dequantize(*packed)
    shutil.copytree(base, tmp_path / "rounded")
    save_file(plain, tmp_path / "rounded" / "model.safetensors", metadata={"format": "pt"})
    apart = {
        "base": (logits(base) - wanted).norm(),
        "rounded": (logits(tmp_path / "rounded") - wanted).norm(),
        "ours": (logits(nvfp4.path) - wanted).norm(),
    }
    assert apart["ours"] < 0.75 * apart["rounded"] < 0.1 * apart["base"], apart
    assert nvfp4.export.distance < 0.1 * nvfp4.base.distance and nvfp4.share >= 0.9


def test_nvfp4_is_the_format_engines_read(trained: SimpleNamespace, nvfp4):
    """Same names, types and shapes as the base; one divisor for what engines fuse."""
    made = load_file(nvfp4.path / "model.safetensors")
    stored = load_file(trained.checkpoint / "model.safetensors")
    assert {n: (t.dtype, t.shape) for n, t in made.items()} == {
        n: (t.dtype, t.shape) for n, t in stored.items()
    }
    section = json.loads((nvfp4.path / "config.json").read_text())["quantization_config"]
    assert section["format"] == "nvfp4-pack-quantized" and section["ignore"] == ["lm_head"]
    for layer in range(2):
        for group in (
            [f"self_attn.{x}_proj" for x in "qkv"],
            ["mlp.gate_proj", "mlp.up_proj"],
        ):
            names = [f"model.layers.{layer}.{name}.weight_global_scale" for name in group]
            assert len({float(made[name]) for name in names}) == 1
    moved = [n for n in made if n.endswith("_packed") and not torch.equal(made[n], stored[n])]
    assert len(moved) == 14
    scales = torch.cat([t.float().flatten() for n, t in made.items() if n.endswith("weight_scale")])
    assert scales.min() >= 2**-6


def open_with(root: Path, model: Path, adapter: Path, format: str) -> Session:
    """A session on a 16-bit model with an adapter, without any training."""
    recipe = tiny_run_recipe(model, root, format=format)
    return open_session(RunFolder.create(root / "runs", "x", recipe), adapter=adapter)


def fed(session: Session) -> list:
    prompts, _ = session.stream.take(0, 24)
    params = SamplingParams(1, 4, 0.0, 0)
    return batches(session, session.engine.sample(prompts, params))


def test_a_small_adapter_survives_where_rounding_loses_it(small: Path, tmp_path: Path):
    """q_proj alone is adapted, by less than a rounding step: nearest codes give the base back.

    k and v share its divisor and are, like all other layers, copied bit for bit.
    """
    make_adapter(small, tmp_path / "adapter", ["q_proj"], 0.003)
    session = open_with(tmp_path, small, tmp_path / "adapter", "nvfp4")
    checkpoint = session.policy.base.checkpoint
    names = {f"model.layers.{i}.self_attn.q_proj" for i in range(2)}
    with Merge(checkpoint, tmp_path / "adapter", live_packed(session.policy)) as merge:
        packed = fed(session)
        layers = list(requantize(merge, session.policy, packed))
        hessians = gather(session.policy, packed, sorted(names))
        (tmp_path / "made").mkdir()
        merge.write_nvfp4(tmp_path / "made", [(layer.name, layer.packed) for layer in layers])
        for layer in layers:
            if layer.name in names:
                weight, base = merge.weight(layer.name), merge.stored(layer.name)
                assert base is not None
                rounded = round_to(weight, base.scale, base.global_scale)
                hessian = hessians[layer.name]
                assert layer.loss == pytest.approx(output_error(layer.packed, weight, hessian))
                assert output_error(rounded, weight, hessian) > 3 * layer.loss
                assert output_error(base, weight, hessian) > 3 * layer.loss
    session.close()
    made, stored = (load_file(f / "model.safetensors") for f in (tmp_path / "made", checkpoint))
    moved = {n.rpartition(".")[0] for n in made if not torch.equal(made[n], stored[n])}
    assert moved == names == {layer.name for layer in layers if layer.loss > 0}
    assert sum(layer.weights for layer in layers) == 2 * (128 * 128 * 3 + 3 * 128 * 352)


def test_what_the_layers_are_fed_with(small: Path, tmp_path: Path):
    """XᵀX against the inputs that hooks of another kind see, of an adapted layer and another."""
    make_adapter(small, tmp_path / "adapter", ["q_proj"])
    session = open_with(tmp_path, small, tmp_path / "adapter", "nvfp4")
    names = ["model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"]
    inputs, packed = {}, fed(session)
    hooks = [
        session.policy.network.get_submodule(name).register_forward_hook(
            lambda module, given, out, name=name: inputs.setdefault(name, []).append(given[0])
        )
        for name in names
    ]
    found = gather(session.policy, packed, names)
    for hook in hooks:
        hook.remove()
    for name in names:
        x = torch.cat([part.flatten(0, -2) for part in inputs[name]]).double()
        torch.testing.assert_close(found[name].double(), x.T @ x, rtol=1e-4, atol=1e-4)
    with pytest.raises(QerlError, match="lm_head is never called"):
        gather(session.policy, packed, ["lm_head"])
    session.close()


def test_a_block_that_outgrows_its_scale_gets_another(small: Path, tmp_path: Path):
    """A delta far larger than the weights: the base's scales cannot hold it."""
    make_adapter(small, tmp_path / "adapter", ["down_proj"], 3.0)
    session = open_with(tmp_path, small, tmp_path / "adapter", "nvfp4")
    with Merge(session.policy.base.checkpoint, tmp_path / "adapter", {}) as merge:
        for layer in requantize(merge, session.policy, fed(session)):
            if "down_proj" in layer.name:
                weight, base = merge.weight(layer.name), merge.stored(layer.name)
                assert base is not None
                assert weight.abs().amax() > 2 * dequantize(*base).abs().amax()
                assert 0 < layer.loss < 0.02
                gap = (dequantize(*layer.packed) - weight).norm() / weight.norm()
                assert gap < 0.2
                halvings = (base.global_scale / layer.packed.global_scale).log2()
                assert halvings > 0 and halvings == halvings.round()
    session.close()


def test_a_16_bit_base_becomes_nvfp4_whole(small: Path, tmp_path: Path):
    """A run on `format: bf16`, merged into NVFP4: every linear layer, adapted or not."""
    make_adapter(small, tmp_path / "adapter", ["q_proj"])
    session = open_with(tmp_path, small, tmp_path / "adapter", "bf16")
    with Merge(small, tmp_path / "adapter", live_packed(session.policy)) as merge:
        layers = list(requantize(merge, session.policy, fed(session)))
        made = tmp_path / "made"
        made.mkdir()
        merge.write_nvfp4(made, [(layer.name, layer.packed) for layer in layers])
    session.close()
    assert len(layers) == 14 and all(0 < layer.loss < 0.02 for layer in layers)
    section = json.loads((made / "config.json").read_text())["quantization_config"]
    assert section["ignore"] == ["lm_head"]
    plain = load_file(small / "model.safetensors")
    for name in (layer.name for layer in layers):
        weight = plain[f"{name}.weight"].float()
        weight = weight + merge.delta.of(name) if name in merge.delta.modules else weight
        plain[f"{name}.weight"] = dequantize(*quantize_absmax(weight))
    shutil.copytree(small, tmp_path / "rounded")
    save_file(plain, tmp_path / "rounded" / "model.safetensors", metadata={"format": "pt"})
    wanted = logits(small, tmp_path / "adapter")
    rounded = (logits(tmp_path / "rounded") - wanted).norm()
    assert (logits(made) - wanted).norm() < 0.9 * rounded


def test_what_was_quantized_in_memory_is_merged_into_as_it_was(small: Path, tmp_path: Path):
    """The files hold 16 bits, training had NVFP4: what was packed is the base, not the files."""
    adapter = tmp_path / "adapter"
    make_adapter(small, adapter, ["q_proj", "down_proj"])
    session = open_with(tmp_path, small, adapter, "nvfp4")
    packed = session.policy.base.checkpoint
    for source, folder in ((small, tmp_path / "a"), (packed, tmp_path / "b")):
        folder.mkdir()
        with Merge(source, adapter, live_packed(session.policy)) as merge:
            merge.write_bf16(folder)
    session.close()
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a[name := "model.layers.0.mlp.up_proj.weight"],
                           load_file(small / "model.safetensors")[name])  # fmt: skip


# ----------------------------------------------------------------------- what others have published


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_bf16_from_any_readable_layout(small: Path, tmp_path: Path, layout: str):
    """NVFP4, FP8 and 16-bit layers of one checkpoint, whoever wrote it."""
    made = publish(small, tmp_path / "base", layout)
    make_adapter(small, tmp_path / "adapter", ["q_proj", "down_proj"])
    seen = []
    with Merge(made.folder, tmp_path / "adapter", {}) as merge:
        (tmp_path / "out").mkdir()
        merge.write_bf16(
            tmp_path / "out", shard_bytes=200_000, progress=lambda *at: seen.append(at)
        )
        delta = merge.delta
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1 and max(f.stat().st_size for f in files) < 210_000
    tensors = {name: t for file in files for name, t in load_file(file).items()}
    for name, weight in made.weights.items():
        if name in delta.modules:
            weight = weight + delta.of(name)
        assert torch.equal(tensors[f"{name}.weight"].float(), weight.bfloat16().float()), name
    assert set(tensors) == set(load_file(small / "model.safetensors"))
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    assert seen[-1] == (len(tensors), len(tensors)) and len(seen) == len(tensors)
    assert torch.isfinite(logits(tmp_path / "out")).all()


# ------------------------------------------------------------------------------------- the decision


def scored(accuracy: float, low: float, high: float, distance: float) -> Score:
    result = EvalResult("x", accuracy, accuracy, (low, high), 100, 1.0, 0.0)
    return Score(result, distance)


def test_the_share_is_of_accuracy_where_the_gain_is_beyond_chance():
    base, adapter = scored(0.2, 0.1, 0.3, 1.0), scored(0.8, 0.7, 0.9, 0.0)
    assert measure_of(base, adapter) == "accuracy"
    assert share_kept(base, adapter, scored(0.5, 0.4, 0.6, 0.0)) == pytest.approx(0.5)
    assert share_kept(base, adapter, scored(0.1, 0.0, 0.2, 0.0)) == pytest.approx(-1 / 6)
    near = scored(0.4, 0.25, 0.5, 0.0)
    assert measure_of(base, near) == "distance"
    assert share_kept(base, near, scored(0.2, 0.1, 0.3, 0.25)) == pytest.approx(0.75)
    worse = scored(0.0, 0.0, 0.05, 0.0)
    assert measure_of(base, worse) == "distance"


def test_the_worst_layers_within_the_budget():
    def layer(name: str, loss: float, weights: int = 10) -> Loss:
        return Loss(name, loss, weights)

    layers = [
        layer("0.q_proj", 0.1), layer("0.k_proj", 0.9, 5), layer("0.v_proj", 0.0, 5),
        layer("0.o_proj", 0.5), layer("1.o_proj", 0.3), layer("2.o_proj", 0.0, 60),
    ]  # fmt: skip
    assert worst_layers(layers, 0) == set()
    assert worst_layers(layers, 0.1) == {"0.o_proj"}, "q, k and v stay together and are too many"
    assert worst_layers(layers, 0.2) == {"0.q_proj", "0.k_proj", "0.v_proj"}
    assert worst_layers(layers, 0.35) == {"0.q_proj", "0.k_proj", "0.v_proj", "0.o_proj"}
    assert "2.o_proj" not in worst_layers(layers, 1), "what the adapter leaves alone is exact"


def test_too_much_loss_leaves_nothing(trained, nvfp4, tmp_path: Path, monkeypatch):
    """The bar is raised out of reach: every step of the budget is tried, then it is an error."""
    said = []
    monkeypatch.setattr(exporting, "LEAST", 1.01)
    with pytest.raises(LossError, match=r"the nvfp4 export keeps \d+% .* --allow-loss") as error:
        export_merged(trained.run, tmp_path / "out", method="nvfp4", budget=0.5, say=said.append)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []
    counts = [int(line.split()[1]) for line in said if line.startswith("keeping")]
    assert counts == sorted(set(counts)) and len(counts) == 3
    assert error.value.merged.adapter.result.accuracy == 1


def test_layers_kept_in_bf16_are_merged_there(trained, nvfp4, tmp_path: Path, monkeypatch):
    """Nothing is enough and loss is allowed: the best attempt is taken, its layers are right."""
    shares = iter([0.1, 0.3, 0.5, 0.4])
    real = exporting.share_kept
    monkeypatch.setattr(exporting, "share_kept", lambda *scores: next(shares, real(*scores)))
    made = export_merged(trained.run, tmp_path / "out", method="nvfp4", budget=0.5, allow_loss=True)
    assert 0 < len(made.kept) < 14 and made.path == tmp_path / "out"
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
    assert not any(path.is_dir() for path in made.path.iterdir())
    tensors, all_packed = (load_file(p / "model.safetensors") for p in (made.path, nvfp4.path))
    delta = Delta(trained.adapter)
    stored = load_file(trained.checkpoint / "model.safetensors")
    for name in delta.modules:
        parts = [f"{name}.weight_{part}" for part in PARTS]
        if name in made.kept:
            wanted = unpacked(stored, name) + delta.of(name)
            assert torch.equal(tensors[f"{name}.weight"], wanted.bfloat16())
            assert not set(parts) & set(tensors)
        else:
            assert all(torch.equal(tensors[part], all_packed[part]) for part in parts)
    section = json.loads((made.path / "config.json").read_text())["quantization_config"]
    assert section["ignore"] == sorted(["lm_head", *made.kept])
    assert torch.isfinite(logits(made.path)).all()


# --------------------------------------------------------------------------------------- mistakes


def test_an_adapter_of_another_base_is_refused_by_shape(small: Path, tmp_path: Path):
    other = write_tiny_model(tmp_path / "other", num_hidden_layers=2, intermediate_size=96)
    make_adapter(other, tmp_path / "adapter", ["down_proj"])
    with (
        pytest.raises(QerlError, match=r"down_proj is \[128, 352\] in .* and \[128, 96\] in the a"),
        Merge(small, tmp_path / "adapter", {}),
    ):
        pass
    deep = write_tiny_model(tmp_path / "deep", num_hidden_layers=3)
    make_adapter(deep, tmp_path / "adapter3", ["down_proj"])
    with (
        pytest.raises(QerlError, match=r"adapts model.layers.2.mlp.down_proj, which .* not hold"),
        Merge(small, tmp_path / "adapter3", {}),
    ):
        pass


def test_an_untrained_adapter_is_not_merged(trained, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(trained.run, run)
    path = run / "adapter" / "adapter_model.safetensors"
    save_file({n: t * ("lora_A" in n) for n, t in load_file(path).items()}, path)
    with pytest.raises(QerlError, match="every B of the adapter is zero"):
        export_merged(run, tmp_path / "out", method="bf16")
    assert not (tmp_path / "out").exists() and len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_leaves_nothing(trained, tmp_path: Path):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
        with pytest.raises(QerlError, match=r"^output: .* cannot be written .* free some space"):
            export_merged(trained.run, tmp_path / "out", method="bf16")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_what_stands_in_the_way_is_not_overwritten(trained, tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(QerlError, match="exists and is not empty"):
        export_merged(trained.run, tmp_path, method="bf16")
    with pytest.raises(QerlError, match="exists and is not empty"):
        export_merged(trained.run, tmp_path / "thesis.txt", method="bf16")
    with pytest.raises(QerlError, match="no share of the weights"):
        export_merged(trained.run, tmp_path / "out", method="nvfp4", budget=2)
    with pytest.raises(QerlError, match="best"):
        (tmp_path / "run").mkdir()
        for name in ("recipe.yaml", "env.json"):
            shutil.copy(trained.run / name, tmp_path / "run" / name)
        export_merged(tmp_path / "run", tmp_path / "out", method="bf16", which="best")
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
