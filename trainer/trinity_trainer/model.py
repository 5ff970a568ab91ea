"""The model under training: loading, sharding with FSDP2, and the log-probs of given tokens.

The log-prob of a token that top-p, top-k or a least length had a part in is of the same part of the
vocabulary (arXiv:2512.02556, section 3.1), so that the ratio of new to old is 1 as long as the weights are
the same. Shapes: B, T, P, K, N as in `collate` and `microbatch`; C cut cells of [B, T] with J kept tokens
together, D cells with X banned tokens together, S rows of logits, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from trinity_data.errors import TrainerError
from trinity_trainer.collate import CellSets, MicroBatch, PackedTokens


def load_policy(model_path: str, mesh: DeviceMesh, device: torch.device) -> torch.nn.Module:
    """A causal language model in float32, sharded over the mesh; bfloat16 in the forward pass on a GPU."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, trust_remote_code=False).to(
        device
    )
    model.config.use_cache = False
    precision = mixed_precision(device.type)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return model  # type: ignore[no-any-return]


def mixed_precision(device_type: str) -> MixedPrecisionPolicy:
    """bfloat16 products on a GPU, gradients summed over ranks in float32; float32 throughout on a CPU."""
    if device_type != "cuda":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def decoder_layers(model: Any) -> torch.nn.ModuleList:
    """The layers of a causal language model, wherever its architecture keeps them. Raises a TrainerError."""
    count = model.config.get_text_config().num_hidden_layers
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    layers = next((module for module in lists if len(module) == count), None)
    if layers is None:
        name = type(model).__name__
        raise TrainerError(
            f"model.model_path: {name} has no list of its {count} decoder layers, so it cannot be sharded; "
            "allowed: causal"
            " language models of transformers that keep their layers in one ModuleList; "
            "docs/reference/models.md names some"
        )
    return layers


def token_logprobs(
    model: torch.nn.Module, batch: MicroBatch, *, with_entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs [B, T] of the targets at each row's sampling temperature, and the entropies [B, T] on demand.

    Where sampling was cut, log-probs are of what it was cut to; entropies are always of the whole vocabulary.

    Values at prompt and padding positions are undefined.
    """
    if batch.packed is not None:
        return _packed_logprobs(model, batch, batch.packed, with_entropy)
    logits_BTV = model(
        input_ids=batch.input_ids_BT, attention_mask=batch.attention_mask_BT, use_cache=False
    ).logits.float()
    scaled_BTV = logits_BTV / batch.temperatures_B[:, None, None]
    logprobs_BT = torch.log_softmax(scaled_BTV, dim=-1).gather(-1, batch.targets_BT[..., None])[..., 0]
    logprobs_BT = with_supports(logprobs_BT, scaled_BTV.flatten(0, 1), batch)
    return logprobs_BT, token_entropy(scaled_BTV) if with_entropy else None


def _packed_logprobs(
    model: torch.nn.Module, batch: MicroBatch, packed: PackedTokens, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    logits_PKV = model(
        input_ids=packed.input_ids_PL,
        attention_mask=packed.sees_P1LL,
        position_ids=packed.position_ids_PL,
        use_cache=False,
        logits_to_keep=packed.num_logits,
    ).logits.float()
    scaled_PKV = logits_PKV / packed.temperatures_P[:, None, None]
    targets_N, shape = batch.targets_BT.flatten()[packed.cells_N], batch.targets_BT.shape
    logprobs_N = torch.log_softmax(scaled_PKV, dim=-1).flatten(0, 1)[packed.sources_N, targets_N]
    logprobs_BT = _at_cells(logprobs_N, packed.cells_N, shape)
    sources_BT = _at_cells(packed.sources_N, packed.cells_N, shape)
    logprobs_BT = with_supports(logprobs_BT, scaled_PKV.flatten(0, 1), batch, sources_BT)
    if not with_entropy:
        return logprobs_BT, None
    entropy_N = token_entropy(scaled_PKV).flatten()[packed.sources_N]
    return logprobs_BT, _at_cells(entropy_N, packed.cells_N, shape)


def token_entropy(logits_BTV: torch.Tensor) -> torch.Tensor:
    """H = −Σ p log p in nats, over the last axis; a logit of −inf counts nothing."""
    logprobs_BTV = torch.log_softmax(logits_BTV, dim=-1)
    entropy_BT: torch.Tensor = torch.special.entr(logprobs_BTV.exp()).sum(dim=-1)
    return entropy_BT


def _at_cells(values_N: torch.Tensor, cells_N: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return values_N.new_zeros(shape.numel()).index_put((cells_N,), values_N).view(shape)


def with_supports(
    logprobs_BT: torch.Tensor,
    scaled_SV: torch.Tensor,
    batch: MicroBatch,
    sources_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """Log-probs [B, T] with those of cut cells over what they were sampled from.

    `sources_BT` says which row of `scaled_SV` predicts a cell; without it they are in the cells' order.
    """
    for sets, logprobs_of in ((batch.kept, logprobs_of_kept), (batch.banned, logprobs_without_banned)):
        if sets is None:
            continue
        sources_C = sets.cells_C if sources_BT is None else sources_BT.flatten()[sets.cells_C]
        of_cells_C = logprobs_of(scaled_SV, sources_C, batch.targets_BT.flatten()[sets.cells_C], sets)
        flat_N = logprobs_BT.flatten().index_put((sets.cells_C,), of_cells_C)
        logprobs_BT = flat_N.view(logprobs_BT.shape)
    return logprobs_BT


def logprobs_of_kept(
    scaled_SV: torch.Tensor, sources_C: torch.Tensor, targets_C: torch.Tensor, kept: CellSets
) -> torch.Tensor:
    """Log-probs [C] of the targets among the kept tokens, which they are part of."""
    values_J = scaled_SV[sources_C[kept.owners_J], kept.tokens_J]
    chosen_C = scaled_SV[sources_C, targets_C]
    most_C = chosen_C.detach().scatter_reduce(0, kept.owners_J, values_J.detach(), "amax")
    sums_C = torch.zeros_like(chosen_C).index_add(0, kept.owners_J, (values_J - most_C[kept.owners_J]).exp())
    return chosen_C - most_C - sums_C.log()


def logprobs_without_banned(
    scaled_SV: torch.Tensor, sources_D: torch.Tensor, targets_D: torch.Tensor, banned: CellSets
) -> torch.Tensor:
    """Log-probs [D] of the targets among all tokens but the banned ones."""
    scaled_DV = scaled_SV[sources_D].index_put(
        (banned.owners_J, banned.tokens_J), scaled_SV.new_tensor(-torch.inf)
    )
    return torch.log_softmax(scaled_DV, -1).gather(-1, targets_D[:, None])[:, 0]


@torch.no_grad()
def sequence_logprobs(
    model: torch.nn.Module, sequences: Sequence[Sequence[int]], device: torch.device
) -> list[list[float]]:
    """The log-prob of each token but the first of sequences of one length.

    A collective: every rank must call it.
    """
    ids_BT = torch.tensor([list(sequence) for sequence in sequences], device=device)
    logprobs_BTV = torch.log_softmax(model(input_ids=ids_BT, use_cache=False).logits.float(), -1)
    chosen_BT = logprobs_BTV[:, :-1].gather(-1, ids_BT[:, 1:, None])[..., 0]
    if isinstance(model, FSDPModule):
        # embeddings and head stay gathered until a backward pass: a checkpoint would take them for shards
        model.reshard()
    return [[float(value) for value in row] for row in chosen_BT.tolist()]


def file_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """Vectors stay as they are: they are small, and some models compute with them in float32."""
    return dtype if tensor.is_floating_point() and tensor.ndim > 1 else tensor.dtype


def full_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """All weights on rank 0, nothing elsewhere. A collective: every rank must call it."""
    return dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)))


def save_pretrained(model: torch.nn.Module, folder: Path, dtype: torch.dtype = torch.float32) -> int:
    """Writes the weights into a Hugging Face folder, matrices as `dtype`; returns the bytes of the files.

    A collective; only rank 0 writes, and returns more than 0.
    """
    state = {name: tensor.to(file_dtype(tensor, dtype)) for name, tensor in full_state_dict(model).items()}
    if dist.get_rank() != 0:
        return 0
    model.save_pretrained(folder, state_dict=state)  # type: ignore[operator]
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
