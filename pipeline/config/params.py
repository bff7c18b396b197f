"""The schema of `params.yaml`: every value that changes an output, one section per stage.

Contract: no field has a default, so every value stands in the file and DVC sees it. Unknown keys
are refused. Sections are frozen. A field's docstring is its unit, its meaning and, where it has
one, its source; `schema.py` publishes it for editors.

Command: `ladder schema` writes the JSON schema made from these classes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    """A strict, frozen part of the configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class Ladder(Section):
    """The rungs a run climbs, from the smallest machine to the largest."""

    rungs: Annotated[dict[str, str], Field(min_length=1)]
    """Each rung and the rung below it, lowest first; `ground` is below the first. `NAME: BELOW` needs `profiles/NAME.yaml`."""

    @model_validator(mode="after")
    def _chained(self) -> Ladder:
        below = "ground"
        for name, stated in self.rungs.items():
            if name == "ground":
                raise ValueError("'ground' is what stands below the first rung; name the rung otherwise")
            if stated != below:
                raise ValueError(f"rung '{name}' stands above '{below}', not '{stated}'; rungs are listed lowest first")
            below = name
        return self

    @property
    def top(self) -> str:
        """The rung on which `train` runs."""
        return list(self.rungs)[-1]


class ScratchBase(Section):
    """A small Llama with random weights and a byte-level BPE trained on the raw text."""

    kind: Literal["scratch"]
    """Made here; nothing is needed but the corpus."""
    corpus: Annotated[list[str], Field(min_length=1)]
    """Files of the raw folder whose text the tokenizer is trained on; globs allowed."""
    vocab_size: Annotated[int, Field(ge=300)]
    """Entries of the tokenizer, the 256 bytes and the special tokens included."""
    hidden_size: Positive
    """Width of the residual stream; a multiple of the number of heads."""
    intermediate_size: Positive
    """Width inside the SwiGLU block."""
    num_hidden_layers: Positive
    """Decoder blocks."""
    num_attention_heads: Positive
    """Query heads; keys and values have as many."""
    max_position_embeddings: Positive
    """Longest text in tokens the model is declared for."""
    seed: int
    """Seed of the random weights."""

    @model_validator(mode="after")
    def _heads_divide(self) -> ScratchBase:
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of 2 x num_attention_heads ({self.num_attention_heads}): "
                "rotary embeddings turn pairs of dimensions"
            )
        return self


class PathBase(Section):
    """A local Hugging Face folder with config, safetensors and tokenizer."""

    kind: Literal["path"]
    """Copied from a folder."""
    path: str
    """The folder; relative to the repository, or absolute."""
    content: Sha256
    """SHA-256 over the folder's files (the error for a wrong value prints the right one), so that another content is
    another run."""
    new_tokens: list[str]
    """Tokens added to tokenizer and embedding, in this order; each new row is the mean of the old ones. []: none."""


class GgufBase(Section):
    """A GGUF file, dequantised to fp32."""

    kind: Literal["gguf"]
    """Converted from a GGUF file."""
    package: str | None
    """Installed Python package that holds the file, or null for a plain path."""
    file: str
    """The file: relative to the package, else to the repository, or absolute."""
    sha256: Sha256
    """SHA-256 of the file (the error for a wrong value prints the right one)."""
    new_tokens: list[str]
    """Tokens added to tokenizer and embedding, in this order; each new row is the mean of the old ones. []: none."""


class HubBase(Section):
    """A model on the Hugging Face hub at one commit."""

    kind: Literal["hub"]
    """Downloaded once."""
    id: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")]
    """`owner/name`."""
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
    """Commit hash of 40 hex digits; a branch or a tag moves and is refused."""
    new_tokens: list[str]
    """Tokens added to tokenizer and embedding, in this order; each new row is the mean of the old ones. []: none."""


BaseParams = Annotated[ScratchBase | PathBase | GgufBase | HubBase, Field(discriminator="kind")]


Column = Literal[
    "instruction",
    "input",
    "context",
    "output",
    "system",
    "history",
    "instances",
    "prompt",
    "completion",
    "messages",
    "conversations",
    "tools",
    "role",
    "content",
    "weight",
    "from",
    "value",
]


class Source(Section):
    """Files of one form, and how much of the mixture they are."""

    files: Annotated[list[str], Field(min_length=1)]
    """Files of the raw folder (globs allowed) or of the hub at a commit. Order matters only for which duplicate is kept."""
    record: Literal["auto", "alpaca", "prompt_completion", "messages", "sharegpt"]
    """Form of the rows. `auto`: for each file the form that most of its first 64 rows show; `metrics/format.json` says which."""
    columns: dict[Column, str]
    """Our name of a column, or of a key in a turn (role, content, weight, from, value), and its name in the files; {}: the
    same names."""
    weight: Annotated[float, Field(gt=0.0, le=1000.0)]
    """How often each training row is taken: 0.5 keeps half of them, 2.0 takes each twice, 1.5 half of them twice; chosen by
    content hash. Held-out rows are taken once whatever the weight."""
    limit: Positive | None
    """Most distinct rows taken, chosen by content hash before the split; null: all."""


class NearDuplicates(Section):
    """Rows that say nearly the same, found by MinHash over 128 permutations (Broder 1997); the first of them is kept."""

    threshold: Annotated[float, Field(ge=0.5, le=1.0)]
    """Least share of common shingles (Jaccard), estimated with a standard error of at most 0.045."""
    shingle: Annotated[int, Field(ge=2, le=64)]
    """Characters per shingle; 5 suits Chinese as well as English."""


class Decontamination(Section):
    """Training rows that repeat a passage of a held-out row are removed."""

    run: Annotated[int, Field(ge=16)]
    """Characters in a row that count as a passage, letter case and white space apart; 64 is about 13 English words."""


class FormatParams(Section):
    """Raw rows to text parts under an instruction template."""

    sources: Annotated[list[Source], Field(min_length=1)]
    """What is read, in this order."""
    template: Literal["chat", "alpaca_en", "alpaca_zh", "own"]
    """`chat`: the base model's own chat template. `alpaca_en`, `alpaca_zh`: plain text with headers, ended by the
    tokenizer's eos. `own`: the text of `own_template`."""
    own_template: str | None
    """Jinja source that gets `messages`, `tools`, `add_generation_prompt` and `eos_token`; null unless `template` is own."""
    supervise: Literal["every_turn", "last_turn", "all_text"]
    """What is trained on: each answer (unless its turn has weight 0), the last one, or all text, questions included."""
    reasoning: Literal["keep", "strip", "split"]
    """`<think>` blocks of answers: kept; taken out; or kept, with a row for each answer where the template drops those of
    earlier turns. Where it drops them and they are not split, the row is rejected."""
    special_tokens: Literal["reject", "escape"]
    """Text that spells a special token: the row is rejected, or a zero-width space is put after the token's first character."""
    near_duplicates: NearDuplicates | None
    """null: only rows that are equal are duplicates."""
    decontaminate: Decontamination | None
    """null: a training row may share passages with a held-out one, though never its opening question."""
    validation_share: Annotated[float, Field(gt=0.0, lt=1.0)]
    """Share of distinct opening questions held out, chosen by content hash."""
    max_reject_share: Share
    """Share of rejected rows above which the stage fails."""
    split_seed: int
    """Salt of the content hashes that choose the held-out rows and the rows of a mixture."""

    @model_validator(mode="after")
    def _own_is_stated(self) -> FormatParams:
        if (self.template == "own") != (self.own_template is not None):
            raise ValueError(
                f"template is '{self.template}' and own_template is {'null' if self.own_template is None else 'given'}; "
                "'own' needs the text of a template there, any other needs null"
            )
        return self


class PackParams(Section):
    """Tokenise and pack."""

    max_length: Annotated[int, Field(ge=8)]
    """Tokens per packed sequence."""
    long_documents: Literal["drop", "truncate", "split", "error"]
    """What happens to a document longer than `max_length`. `truncate` keeps its beginning, without a stop token; `split`
    cuts it before questions, as many turns to a piece as fit, each piece with the system turn and the tools of the row, and
    drops what is too long by itself. What is left without a supervised token is dropped."""


class FullTuning(Section):
    """Every weight is trained."""

    kind: Literal["full"]
    """No adapters."""


class LoraTuning(Section):
    """Low-rank adapters on linear layers (arXiv:2106.09685)."""

    kind: Literal["lora"]
    """Adapters; the base weights stay as they are."""
    rank: Positive
    """Rank of the update."""
    alpha: Positive
    """The update is scaled by alpha / rank."""
    dropout: Share
    """Dropout before the low-rank product."""
    target_modules: Annotated[list[str], Field(min_length=1)]
    """Names of the linear layers, or `all-linear`."""


class DoraTuning(LoraTuning):
    """Adapters that train length and direction of each weight column apart (arXiv:2402.09353)."""

    kind: Literal["dora"]  # pyright: ignore[reportIncompatibleVariableOverride] - the tag of the union
    """Adapters with a trained magnitude per output; slower than `lora` at equal rank."""


class QloraTuning(LoraTuning):
    """Adapters over a quantised base (arXiv:2305.14314); needs a GPU and the extra `qlora`."""

    kind: Literal["qlora"]  # pyright: ignore[reportIncompatibleVariableOverride] - the tag of the union
    """The frozen base is held in few bits; gradients pass through it."""
    bits: Literal[4, 8]
    """4: NormalFloat with double quantisation; 8: LLM.int8()."""


class Precision(Section):
    """Number formats of a run; loader, trainer and engine are all set from here."""

    compute: Literal["fp32", "tf32", "bf16", "fp16"]
    """Arithmetic of forward and backward. `tf32`: fp32 with matrix products at 10 bits of mantissa (GPUs since Ampere)."""
    masters: Literal["fp32", "bf16"]
    """Weights that the optimizer updates, with its state. `bf16` takes 6 bytes a parameter instead of 14 (8 under ZeRO-1 and 2,
    which keep a copy) and loses updates below 1/256 of a weight."""
    embeddings: Literal["compute", "fp32"]
    """Format of input embeddings in the forward pass; `fp32` runs the others under autocast, each weight cast once a pass."""


class FixedClipping(Section):
    """One limit for all steps."""

    kind: Literal["fixed"]
    """The classic rule."""
    max_norm: Annotated[float, Field(gt=0.0)]
    """L2 norm of the whole gradient above which it is scaled down to it."""


class AdaptiveClipping(Section):
    """A limit from the run's own norms: mean + `deviations` standard deviations of their logarithm, both as moving averages
    (after ZClip, arXiv:2504.02507)."""

    kind: Literal["adaptive"]
    """The limit follows the run; a spike is cut back and enters the averages as the limit, so that it does not raise it."""
    max_norm: Annotated[float, Field(gt=0.0)]
    """The limit never exceeds this; it alone holds during the first `window` steps."""
    window: Annotated[int, Field(ge=2)]
    """Steps over which the averages look back: each new norm weighs 2 / (window + 1)."""
    deviations: Annotated[float, Field(gt=0.0)]
    """Standard deviations above the mean that are let through; 2.5 touches about 1 step in 100 of a calm run."""


class TrainParams(Section):
    """What is optimised; where it runs stands in a profile."""

    tuning: Annotated[FullTuning | LoraTuning | DoraTuning | QloraTuning, Field(discriminator="kind")]
    """Which weights are trained: all, or adapters beside them."""
    precision: Precision
    """Number formats."""
    global_batch: Positive
    """Packed sequences per optimizer step over all ranks."""
    epochs: Positive
    """Passes over the packed sequences; the last step is filled from the next pass."""
    learning_rate: Annotated[float, Field(gt=0.0)]
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"]
    """Decay after warm-up, to zero (constant: none)."""
    warmup_share: Share
    """Share of the steps with a linearly rising rate."""
    weight_decay: Annotated[float, Field(ge=0.0)]
    """AdamW's decoupled decay (arXiv:1711.05101); not on biases and norms."""
    adam_beta1: Share
    """Decay of the first moment."""
    adam_beta2: Share
    """Decay of the second moment."""
    adam_epsilon: Annotated[float, Field(gt=0.0)]
    """AdamW's epsilon."""
    clipping: Annotated[FixedClipping | AdaptiveClipping, Field(discriminator="kind")]
    """How the gradient is limited before a step."""
    seed: int
    """Seed of data order, dropout and adapter weights."""
    deepspeed_override: dict[str, JsonValue]
    """Keys of DeepSpeed's configuration that this schema has no field for, laid over the generated one. Refused: keys DeepSpeed
    does not know, and those that a field of ours decides."""


class SmokeParams(Section):
    """Limits of the smoke gate."""

    samples: Annotated[int, Field(ge=2)]
    """Documents trained on."""
    epochs: Positive
    """Passes over them; the loss must have fallen after the last."""
    min_loss_drop: Annotated[float, Field(gt=0.0, lt=1.0)]
    """Least share by which the loss must fall from the first step to the mean of the last pass."""
    max_gradient_error: Annotated[float, Field(gt=0.0)]
    """Largest relative L2 distance between the engine's first gradient and a single-process fp32 one."""
    max_loss_error: Annotated[float, Field(gt=0.0)]
    """Largest relative distance between the engine's first loss and the single-process one."""
    max_memory_skew: Annotated[float, Field(ge=1.0)]
    """Largest ratio of peak memory between two ranks."""
    time_limit: Positive
    """Seconds after which the gate gives up and says so."""


class ResumeParams(Section):
    """Limits of the resume gate."""

    steps: Annotated[int, Field(ge=3)]
    """Optimizer steps of the straight run."""
    kill_after: Positive
    """Step whose checkpoint is complete when the ranks are killed; between 1 and `steps` - 2, so that work is lost and redone."""
    max_loss_gap: Annotated[float, Field(ge=0.0)]
    """Largest absolute difference in loss, and in gradient norm, between straight and resumed run; 0 asks for bit equality."""
    max_weight_gap: Annotated[float, Field(ge=0.0)]
    """Largest absolute difference of an exported weight; 0 asks for bit equality."""
    max_logit_gap: Annotated[float, Field(ge=0.0)]
    """Largest absolute difference between the logits of the trained model and of its export."""
    time_limit: Positive
    """Seconds after which one run of the gate is given up."""

    @model_validator(mode="after")
    def _killed_inside(self) -> ResumeParams:
        if not 1 <= self.kill_after <= self.steps - 2:
            raise ValueError(
                f"kill_after {self.kill_after} must lie between 1 and steps - 2 ({self.steps - 2}), "
                "so that a step is lost and redone"
            )
        return self


class ExportParams(Section):
    """ZeRO shards to a model folder."""

    dtype: Literal["float32", "bfloat16", "float16"]
    """Type of the exported weights; the shards are fp32."""
    max_shard_gib: Annotated[float, Field(gt=0.0)]
    """Size limit of one safetensors file, GiB."""
    max_logit_gap: Annotated[float, Field(ge=0.0)]
    """Largest absolute difference between the logits of the trained model and of the export."""


class EvaluateParams(Section):
    """Held-out loss and generation, base and tuned side by side."""

    rows: Positive
    """Held-out rows generated for; the first ones in file order."""
    max_new_tokens: Positive
    """Length limit of an answer in tokens; an answer that reaches it has not stopped."""
    batch: Positive
    """Prompts generated together."""


class Params(Section):
    """All of params.yaml."""

    ladder: Ladder
    base: BaseParams
    format: FormatParams
    pack: PackParams
    smoke: SmokeParams
    resume: ResumeParams
    train: TrainParams
    export: ExportParams
    evaluate: EvaluateParams
