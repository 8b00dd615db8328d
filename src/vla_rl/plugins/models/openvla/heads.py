"""Parts in addition to the public network: the state's projector, the critics, the L1 head, and the module that holds
all parameters."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn import functional as F

from vla_rl.core.randomness import Noise
from vla_rl.plugins.models.openvla.modeling import OpenVLAForActionPrediction
from vla_rl.toolkit.models.heads import ValueHead, initialise_layer
from vla_rl.toolkit.models.meta_device import device_autocast
from vla_rl.toolkit.models.networks import as_tensor


class ProprioProjector(nn.Module):
    """Projects the state [B, S] to one embedding [B, 1, D]; keys of OFT's `proprio_projector--*_checkpoint.pt`."""

    def __init__(self, state_dim: int, llm_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(state_dim, llm_dim)
        self.fc2 = nn.Linear(llm_dim, llm_dim)

    def forward(self, state: Tensor) -> Tensor:
        result: Tensor = self.fc2(F.gelu(self.fc1(state))).unsqueeze(1)
        return result


class OpenVLAValueHead(ValueHead):
    """Critic on hidden states: values float32 [B], or [B, outputs] where `outputs` is a number. Its weights stay in
    float32. The last layer has no bias and starts small, so that values start near 0."""

    def __init__(self, dim: int, hidden: tuple[int, ...], outputs: int | None, detach: bool, seed: int) -> None:
        super().__init__(dim, hidden, outputs, detach, seed, last_bias=False)
        self.clock: nn.Embedding | None = None
        """Embedding of the episode's step."""

    def forward(self, hidden: Tensor, at: Tensor, mask: Tensor | None, steps: Tensor | None = None) -> Tensor:
        """Return values.

        Args:
            hidden: [B, S, D].   at: int64 [B], position that predicts the first action token.
            mask: bool [B, S], False at padding; None without padding.
            steps: int64 [B], step counts of the episodes; None: unknown.
        """
        with device_autocast(hidden.device.type, enabled=False):
            hidden = hidden.detach() if self.detach else hidden
            x = self._pool_hidden(hidden, at, mask)
            if self.clock is not None:
                x = x + self.clock(
                    torch.zeros_like(at) if steps is None else steps.clamp(max=self.clock.num_embeddings - 1)
                )
            return self.run_layers(x, F.gelu)

    def _pool_hidden(self, hidden: Tensor, at: Tensor, mask: Tensor | None) -> Tensor:
        return hidden[torch.arange(len(hidden), device=hidden.device), at].float()


class AttentionValueHead(OpenVLAValueHead):
    """Critic that attends from that position over image and prompt, and adds the result to its hidden state."""

    def __init__(
        self, dim: int, hidden: tuple[int, ...], outputs: int | None, detach: bool, seed: int, heads: int = 4
    ) -> None:
        super().__init__(dim, hidden, outputs, detach, seed)
        self.heads = heads
        query, key, value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.query = query
        self.key = key
        self.value = value
        rng = torch.Generator().manual_seed(seed + 1)
        for layer in (self.query, self.key, self.value):
            initialise_layer(layer, 1.0, rng)

    def _pool_hidden(self, hidden: Tensor, at: Tensor, mask: Tensor | None) -> Tensor:
        last_state = super()._pool_hidden(hidden, at, mask)
        seen = torch.arange(hidden.shape[1], device=hidden.device) <= at[:, None]
        seen = seen if mask is None else seen & mask
        states = hidden.float()
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query(last_state)[:, None], self.key(states), self.value(states))
        )
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None, :])
        return last_state + attended.flatten(1)


class ActionValueHead(OpenVLAValueHead):
    """Critic that pools the hidden states of all action tokens with learnt weights (AcceRL, equations 14 to 16, without
    the bias, to which a softmax is invariant). `steps`: size of an embedding of the episode's step, which is added; it
    starts at 0, and later steps use the last row."""

    def __init__(
        self,
        dim: int,
        hidden: tuple[int, ...],
        outputs: int | None,
        detach: bool,
        seed: int,
        tokens: int,
        steps: int | None = None,
    ) -> None:
        super().__init__(dim, hidden, outputs, detach, seed)
        self.tokens = tokens
        self.score = nn.Linear(dim, 1, bias=False)
        initialise_layer(self.score, 1.0, torch.Generator().manual_seed(seed + 1))
        if steps is not None:
            self.clock = nn.Embedding(steps, dim)
            nn.init.zeros_(self.clock.weight)

    def _pool_hidden(self, hidden: Tensor, at: Tensor, mask: Tensor | None) -> Tensor:
        rows = torch.arange(len(hidden), device=hidden.device)[:, None]
        states = hidden[rows, at[:, None] + torch.arange(self.tokens, device=hidden.device)].float()
        result: Tensor = (self.score(states).softmax(1) * states).sum(1)
        return result


class ResidualBlock(nn.Module):
    """Residual block x + relu(linear(norm(x)))."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.ffn(x)
        return result


class ResidualMLP(nn.Module):
    """MLP of the L1 head, with OpenVLA-OFT's parameter names."""

    def __init__(self, inputs: int, hidden: int, outputs: int, blocks: int = 2) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(inputs)
        self.fc1 = nn.Linear(inputs, hidden)
        self.mlp_resnet_blocks = nn.ModuleList(ResidualBlock(hidden) for _ in range(blocks))
        self.layer_norm2 = nn.LayerNorm(hidden)
        self.fc2 = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        result: Tensor = self.fc2(self.layer_norm2(x))
        return result


class L1Head(nn.Module):
    """Regression head: maps hidden states of a chunk [B, C * A, D] to its normalised actions [B, C, A]; one step's A
    hidden states together give its action. Keys of OpenVLA-OFT's `action_head--*_checkpoint.pt`."""

    def __init__(self, llm_dim: int, action_dim: int) -> None:
        super().__init__()
        self.action_dim = action_dim
        self.model = ResidualMLP(action_dim * llm_dim, llm_dim, action_dim)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.model(hidden.unflatten(1, (-1, self.action_dim)).flatten(2))
        return result


class Deviation(nn.Module):
    """Distribution of actions around the L1 head's, with one learnt scale for each number of a chunk, in float32.
    `temperature` T raises the density to the power 1 / T."""

    def __init__(self, chunk: int, action_dim: int, kind: str, start: float, temperature: float) -> None:
        super().__init__()
        self.laplace = kind == "laplace"
        # The density to the power 1 / T is a Laplace of T times the scale, or a Gaussian of T times the variance.
        self.spread = temperature if self.laplace else temperature**0.5
        self.log_scale = nn.Parameter(torch.full((chunk, action_dim), math.log(start)))

    def draw_offset(self, noise: Noise) -> Tensor:
        """Return a sample float32 [B, C, A] with this scale around 0."""
        shape, device = self.log_scale.shape, self.log_scale.device
        if self.laplace:  # a Laplace number is the difference of two exponential ones
            waits = -torch.log1p(-as_tensor(noise.uniforms(*shape, 2), device))
            unit = waits[..., 0] - waits[..., 1]
        else:
            unit = as_tensor(noise.normals(*shape), device)
        return self.spread * self.log_scale.exp() * unit

    def log_density(self, offset: Tensor) -> Tensor:
        """Return the log density of each element of offsets [B, C, A] from the head's actions."""
        scale = self.spread * self.log_scale.exp()
        if self.laplace:
            return -offset.abs() / scale - (2 * scale).log()
        return -0.5 * (offset / scale) ** 2 - scale.log() - 0.5 * math.log(2 * math.pi)

    def compute_entropy(self) -> Tensor:
        """Return the entropy [C, A] in nats."""
        constant = 1 + math.log(2) if self.laplace else 0.5 * math.log(2 * math.pi * math.e)
        return self.log_scale + math.log(self.spread) + constant


def public_network(model: nn.Module) -> OpenVLAForActionPrediction:
    """Return the network inside adapters, or the network itself."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(inner, OpenVLAForActionPrediction)
    return inner


class PolicyModule(nn.Module):
    """Network with all parameters of a policy."""

    def __init__(
        self,
        vla: OpenVLAForActionPrediction,
        proprio_projector: ProprioProjector | None = None,
        value_head: OpenVLAValueHead | None = None,
        action_head: L1Head | None = None,
        deviation: Deviation | None = None,
    ) -> None:
        super().__init__()
        self.vla: nn.Module = vla
        self.proprio_projector = proprio_projector
        self.value_head = value_head
        self.action_head = action_head
        self.deviation = deviation


class OFTModule(PolicyModule):
    """Parallel decoding: one forward pass gives action logits (or, with the L1 head, actions) and values."""

    def forward(
        self,
        pixels: Tensor | None,
        state: Tensor | None,
        ids: Tensor,
        mask: Tensor | None,
        placeholder: Tensor,
        start: Tensor,
        reads: int,
        features: Tensor | None = None,
        steps: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run the network and read `reads` successive positions, the first one being the last prompt token.

        Args:
            pixels: [B, 6 * images, H, W], or None where `features` are given.   state: normalised [B, S] or None.
            ids, mask, blank: [B, L], see `OpenVLAForActionPrediction.forward`.   features: as there.
            start: int64 [B], index of the last prompt token in `ids`.   reads: 0 for values only.
            steps: int64 [B], step counts of the episodes, for a critic that uses them; None: unknown.
        Returns:
            float32 logits [B, reads, bins] (None without reads) and values [B] | [B, C] (None without a critic). With
            the L1 head: normalised actions [B, C, A] instead of logits.
        """
        extra = None
        if self.proprio_projector is not None and state is not None:
            extra = self.proprio_projector(state)
        hidden = self.vla(pixels, ids, attention_mask=mask, placeholder=placeholder, extra=extra, features=features)
        first = start + hidden.shape[1] - ids.shape[1]
        # no mask: padding comes after the positions that the critic sees
        values = None if self.value_head is None else self.value_head(hidden, first, None, steps)
        if not reads:
            return None, values
        head = public_network(self.vla).action_logits if self.action_head is None else self.action_head
        return self.read_positions(head, hidden, first, reads), values

    def read_positions(self, head: Callable[[Tensor], Tensor], hidden: Tensor, first: Tensor, reads: int) -> Tensor:
        """Return a head's output for this many hidden states from position `first` (int64 [B]) on."""
        rows = torch.arange(len(hidden), device=hidden.device)
        positions = first[:, None] + torch.arange(reads, device=hidden.device)
        return head(hidden[rows[:, None], positions]).float()
