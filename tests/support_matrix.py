"""The tables of support: which models, loops and features work, are refused, wrong or untested, with evidence.

    python -m tests.support_matrix          # writes the tables into docs/

`tests/unit/test_docs_pages.py` checks that the pages hold these tables, that every test named here exists, and that
every model of `tests/integration/models/test_models.py` has a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.generated_places import with_generated
from tests.integration.architectures import CAUSAL, MASKED
from tests.planned_table import render_planned
from tests.support import ROOT
from tests.sweep_table import render_sweep

PAGES = {
    ROOT / "docs" / "support.md": ("legend", "models"),
    ROOT / "docs" / "support-loops.md": ("loops",),
    ROOT / "docs" / "support-features.md": ("features",),
    ROOT / "docs" / "architectures.md": ("sweep", "planned"),
}

STATUS = {
    "tested": "CI compares it with a single-process run",
    "tried": "equal to one process when tried by hand; no test repeats it",
    "self-checked": "CI compares outputs and gradients of a short batch with one process",
    "refused": "stops at the start or first forward; the message names the reason",
    "fails": "stops with an error that does not name the reason",
    "wrong": "**wrong results without an error: do not use it**",
    "untested": "nobody has tried it",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of a table.

    Args:
        what: the model, loop or feature, in Markdown.
        status: a key of `STATUS`.
        tests: ``file::function`` of the tests that show it.
        cases: names in ``MODELS`` or ``REFUSED`` of tests/integration/models/test_models.py.
        types: of models, as in config.json, which the page folds up below the table.
        note: for the reader.
    """

    what: str
    status: str
    tests: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    note: str = ""


_MODELS = "tests/integration/models/test_models.py::test_gradients_equal_those_of_the_undivided_model"
_SELF_CHECK = "tests/integration/models/test_self_check.py::test_models_that_would_train_on_something_else_are_refused"
_BREADTH = "tests/integration/models/test_self_check_breadth.py::test_no_exact_architecture_raises_an_alarm"
_TOWERS = "tests/integration/models/test_towers.py::test_gradients_equal_those_of_the_undivided_model"
_TOWERS_CHECKED = "tests/integration/models/test_towers.py::test_the_self_check_passes_them"
_TOWERS_TRAINED = "tests/integration/models/test_towers.py::test_training_equals_one_process"
_RECURRENT = "tests/integration/models/test_recurrent.py::test_gradients_equal_those_of_the_undivided_model"
_REFUSED = "tests/integration/models/test_models.py::test_what_cannot_be_split_is_refused_by_name"
_COMPILED = "tests/integration/models/test_compiled.py::"
_FEATURES = "tests/integration/models/test_features.py::"
_ARGUMENTS = "tests/integration/models/test_forward_arguments.py::"
_PLAIN_LOOP = "tests/integration/loops/test_plain_loop.py::test_training_equals_one_process"
_TRAINER = "tests/integration/trainer/test_trainer.py::test_training_equals_one_process"
_EXAMPLES = "tests/integration/test_examples.py::test_example_trains_alike_on_uneven_ranks_and_in_one_process"
_ZERO12 = "tests/integration/zero/test_zero12.py::test_training_equals_equal_partitions"
_ZERO3 = "tests/integration/zero/test_zero3.py::test_training_equals_that_of_equal_shards"
_EXPERTS = "tests/integration/loops/test_experts.py::"
_EXPERT_ADAPTERS = "tests/integration/loops/test_expert_adapters.py::"
_TRAINED_EXPERTS = "tests/integration/trainer/test_trainer_experts.py::"
_WITHIN = "tests/integration/zero/test_zero_within_nodes.py::"


_TRL = "tests/integration/trainer/test_trl.py::"
_COMPLETIONS = "tests/integration/trainer/test_trl_completions.py::"
_ANY = "tests/integration/loops/test_any_module.py::"
_LOSSES_REFUSED = (
    "tests/integration/trainer/test_trainer.py::test_losses_that_would_see_a_part_of_the_sequence_are_refused"
)
_SHARDS = "tests/integration/models/test_features.py::test_a_shard_is_never_taken_for_a_whole_sequence"
_UNLIKE = "tests/integration/loops/test_unlike_losses.py::"
_OWN_TERMS = "tests/integration/loops/test_own_terms.py::"
_TILES = "tests/integration/models/test_tiles.py::"


def _model(what: str, *cases: str, note: str = "") -> Row:
    return Row(what=what, status="tested", tests=(_MODELS,), cases=cases, note=note)


def _refused(what: str, *cases: str, note: str = "") -> Row:
    return Row(what=what, status="refused", tests=(_REFUSED,) if cases else (), cases=cases, note=note)


def _self_checked(what: str, *cases: str, note: str = "") -> Row:
    return Row(
        what=what,
        status="refused",
        tests=(_SELF_CHECK,),
        cases=cases,
        note=f"self-check, first batch: {note}",
    )


def _tried(what: str, note: str = "") -> Row:
    return Row(what=what, status="tried", note=note)


def _fails(what: str, note: str) -> Row:
    return Row(what=what, status="fails", note=note)


_MODEL_ROWS = (
    _model("Llama", "llama", note="plain, padded left and right, packed documents"),
    _model("Qwen2 with sliding windows", "qwen2 window"),
    _model("Qwen3", "qwen3"),
    _model("Mistral with sliding windows", "mistral window"),
    _model("Mixtral", "mixtral"),
    _model(
        "auxiliary loss of MoE routers: Mixtral, Qwen3-MoE ...",
        "mixtral router loss",
        "qwen3 moe router loss",
        note="[notes](#notes-on-models)",
    ),
    _model(
        "Gemma 2 with soft-capping",
        "gemma2 softcap",
        note="`eager` attention; left padding: [notes](#notes-on-models)",
    ),
    _model("Gemma 3, text", "gemma3"),
    _model("gpt-oss with attention sinks", "gpt-oss sinks", note="`eager` attention; plain, padded, packed"),
    _model("DeepSeek-V3 with latent attention", "deepseek mla"),
    _model(
        "RoPE that depends on the length (`dynamic`, `longrope`)",
        "dynamic rope",
        "longrope",
        note="largest position of the whole batch; not in pipeline stages",
    ),
    _model("BERT as masked language model", "bert"),
    _model("GPT-2", "gpt2"),
    Row(
        what="linear attention: Qwen3-Next, Qwen3.5 (text), OLMo-Hybrid, Kimi-Linear",
        status="tested",
        tests=(_RECURRENT,),
        note="in custom loops: [notes](#notes-on-models)",
    ),
    Row(
        what="Mamba-2 hybrids: Bamba, Falcon-H1, Granite hybrid, Nemotron-H, Zamba2",
        status="tested",
        tests=(_RECURRENT,),
        note="in custom loops; Falcon-H1 in all: [notes](#notes-on-models)",
    ),
    Row(what="short convolutions: LFM2", status="tested", tests=(_RECURRENT,)),
    Row(
        what="images and text: Qwen2.5-VL, Qwen3-VL, Qwen3.5, LLaVA, SmolVLM",
        status="tested",
        tests=(_TOWERS, _TOWERS_CHECKED, _TOWERS_TRAINED),
        note="plain, padded, recomputed; videos are untested",
    ),
    Row(
        what="audio and text: Qwen2-Audio, Voxtral",
        status="tested",
        tests=(_TOWERS, _TOWERS_CHECKED),
        note="plain, padded, recomputed",
    ),
    Row(
        what="[decoders](architectures.md#which-types-train) that pass the self-check",
        types=tuple(CAUSAL),
        status="self-checked",
        tests=(_BREADTH,),
        note="fp32 and bf16; plain, packed, padded; left padding: [notes](#notes-on-models)",
    ),
    Row(
        what="[masked language models](architectures.md#which-types-train) that pass the self-check",
        types=tuple(MASKED),
        status="self-checked",
        tests=(_BREADTH,),
        note="fp32 and bf16; plain, packed, padded",
    ),
    _model("OPT, all sizes", "opt", note="counts positions from the attention mask, as OPT does"),
    _model(
        "RoBERTa, XLM-R (XL too), X-MOD, CamemBERT, Roberta-PreLayerNorm, Data2Vec-Text, ESM",
        "roberta",
        "roberta decoder",
        "esm",
        note="positions start at `padding_idx + 1`; padding needs an `attention_mask`",
    ),
    _self_checked(
        "ESM-2 with `token_dropout`", "esm token dropout", note="depends on the whole sequence's share of masks"
    ),
    _self_checked("MobileBERT", "mobilebert", note="its embedding reads neighbouring tokens"),
    _self_checked(
        "`ElectraForPreTraining`",
        "electra",
        note="its labels must not be shifted",
    ),
    _self_checked("`GPT2DoubleHeadsModel`", "gpt2 double heads", note="its labels would be shifted twice"),
    _refused("attention dropout", "dropout", note="set it to 0"),
    _refused(
        "auxiliary loss of routers in models with images",
        "router loss with images",
        note="set `router_aux_loss_coef` to 0",
    ),
    Row(
        what="decoder `...ForSequenceClassification`, rewards too, by sharded calls",
        status="tested",
        tests=("tests/integration/loops/test_sharded_call.py::test_a_classifier_trains_as_on_one_process",),
        note="whole batches only; batches of `handle.dataloader` are refused",
    ),
    _refused("heads that pool over the sequence: question answering, multiple choice", "pooling"),
    _refused("classification on an encoder's pooler", "pooler"),
    _refused("encoder-decoders: T5, BART, M2M, Pegasus ...", "encoder-decoder"),
    _refused("recurrent layers: Mamba, RWKV, RecurrentGemma ...", "recurrent"),
    _refused(
        "Mamba-1 hybrids: Jamba, Zamba, FalconMamba",
        "state space of the first kind",
        note="the Mamba-1 scan cannot be split by heads",
    ),
    _refused("chunked attention: Llama 4", "chunks"),
    Row(
        what="aLoRA, Lily, PVeRA, prompt and prefix tuning (PEFT)",
        status="refused",
        tests=(
            "tests/integration/models/test_adapters.py::test_kinds_that_are_called_refused_end_the_start_on_every_rank",
        ),
        note="[all adapters](adapters.md)",
    ),
    _refused(
        "bidirectional image tokens: Gemma 3 with images, PaliGemma",
        "masks by blocks of images",
        "images before a prefix",
        note="with text alone too",
    ),
    _refused("cross attention to images: Mllama", "cross attention to images"),
    _refused(
        "custom attention code: BLOOM, MPT, Falcon, GPT-J, DeBERTa, BigBird ...",
        note="transformers cannot replace their attention",
    ),
    _refused("sparse and indexed attention: DeepSeek-V3.2, GLM-DSA, dots3"),
    _refused("bidirectional sliding windows: ModernBERT, NeoMME, UltraBERT", "windows in both directions"),
    _refused("JetMoe", "keys repeated by experts", note="its experts share keys"),
    _refused("Doge", "masks by content", note="chooses keys by content"),
    Row(what="DBRX, Gemma 3n with images", status="untested", note="the tests have no tiny model of them"),
)

_LOOP_ROWS = (
    Row(
        what="HF Trainer, ZeRO 1 to 3: one or two replicas, a rank without tokens",
        status="tested",
        tests=(_TRAINER, "tests/integration/trainer/test_trainer.py::test_resume_under_another_schedule"),
        note="resumes mid-epoch under another schedule; [notes](#notes-on-loops-and-trainers)",
    ),
    Row(
        what="TRL SFTTrainer with packing",
        status="tested",
        tests=("tests/integration/trainer/test_trainer.py::test_trl_trains_packed_documents_as_one_process",),
    ),
    Row(
        what="`placement: documents`: custom loop, HF Trainer, TRL",
        status="tested",
        tests=(
            "tests/integration/loops/test_documents.py::test_a_plain_loop_trains_as_one_process",
            "tests/integration/trainer/test_trainer.py::test_flattened_documents_train_and_resume_as_on_one_process",
            "tests/integration/trainer/test_trainer.py::test_trl_trains_packed_documents_as_one_process",
        ),
        note="flattening collator, TRL packing, padded rows",
    ),
    Row(
        what="accelerate loop: one or two replicas",
        status="tested",
        tests=(
            "tests/integration/trainer/test_accelerate.py::test_loop_on_two_ranks_equals_one_process",
            "tests/integration/trainer/test_accelerate.py::test_loop_on_two_replicas_equals_one_process",
        ),
        note="[notes](#notes-on-loops-and-trainers)",
    ),
    Row(
        what="custom loop with `deepspeed.initialize`, ZeRO 0 to 3",
        status="tested",
        tests=(_PLAIN_LOOP,),
        note="2 and 4 ranks",
    ),
    Row(what="unchanged script for stock Ulysses, run by `ds_hetero.run`", status="tested", tests=(_EXAMPLES,)),
    Row(
        what="replicas of different sizes",
        status="tested",
        tests=(
            "tests/integration/loops/test_replicas.py::test_a_plain_loop_equals_one_process",
            "tests/integration/loops/test_replicas.py::test_an_accelerate_loop_equals_one_process",
            "tests/integration/loops/test_replicas.py::test_the_trainer_equals_one_process",
        ),
        note="custom loop, accelerate, HF Trainer",
    ),
    Row(
        what="`loss = engine(**batch).loss`, with accelerate too",
        status="tested",
        tests=(
            "tests/integration/loops/test_plain_loop.py::test_the_loss_of_the_outputs_trains_as_on_one_process",
            "tests/integration/trainer/test_accelerate.py::test_loop_on_two_ranks_equals_one_process",
            "tests/integration/models/test_features.py::test_lora_adapters_train_as_on_one_process",
        ),
        note="custom loop and accelerate",
    ),
    Row(
        what="`num_items_in_batch`, tuples, batches without labels",
        status="tested",
        tests=(
            _ARGUMENTS + "test_the_sum_over_num_items_in_batch_is_that_of_one_process",
            _ARGUMENTS + "test_what_is_refused_is_named_on_every_rank",
            _ARGUMENTS + "test_a_batch_without_labels_counts_nothing",
            _ARGUMENTS + "test_pipelines_take_these_arguments_alone",
        ),
        note="[all arguments of a forward](forward-arguments.md)",
    ),
    Row(
        what="custom loss, four conventions",
        status="tested",
        tests=("tests/integration/loops/test_losses.py::test_every_loss_convention_on_every_stage_equals_one_process",),
        note="[custom losses](losses.md)",
    ),
    Row(
        what="DeepSpeed's and accelerate's own tests of Ulysses",
        status="tested",
        tests=(
            "tests/integration/test_peers.py::test_deepspeeds_own_test_of_ulysses_holds",
            "tests/integration/test_peers.py::test_accelerates_own_test_of_ulysses_holds",
        ),
    ),
    _tried("HF Trainer: `group_by_length`, `auto_find_batch_size`, left padding"),
    _tried("HF Trainer: IterableDataset, streaming, workers"),
    _tried("TRL SFT: `bfd`, `bfd_split`, `wrapped`, padding-free, streaming"),
    _tried("TRL SFT: completion only, assistant only, LoRA"),
    _tried("TRL SFT of MoE models with `router_aux_loss_coef=0`"),
    _tried("`accelerate launch --module ds_hetero.run` with TRL's `sft.py`"),
    Row(
        what="extra loss term, averaged by `handle.mean`",
        status="tested",
        tests=(_OWN_TERMS + "test_a_term_made_by_the_handle_trains_as_on_one_process",),
    ),
    Row(
        what="extra loss term without `handle.mean`",
        status="refused",
        tests=(_OWN_TERMS + "test_a_term_of_a_rank_is_refused",),
        note="would be weighted by ranks, not by tokens",
    ),
    Row(
        what="NEFTune",
        status="tested",
        tests=(_OWN_TERMS + "test_noise_on_embeddings_is_that_of_the_whole_sequence",),
        note="noise scaled for the whole sequence",
    ),
    Row(
        what="reference model, or trained model in `eval()`, on sharded batches",
        status="refused",
        tests=(_SHARDS,),
        note="[notes](#notes-on-loops-and-trainers)",
    ),
    Row(
        what="HF Trainer: label smoothing, `compute_loss_func`, evaluation over a replica's ranks",
        status="tested",
        tests=(
            "tests/integration/trainer/test_trainer.py::test_losses_of_all_logits_train_and_evaluate_as_on_one_process",
        ),
        note="every rank holds the logits of whole batches",
    ),
    Row(
        what="sequence-level losses by `handle.sharded_call`, ZeRO 0 to 3",
        status="tested",
        tests=("tests/integration/loops/test_sharded_call.py::test_a_preference_loss_trains_as_on_one_process",),
        note="with a reference model too",
    ),
    Row(
        what="TRL 1.16: DPO, RewardTrainer, GKD, KTO, CPO, ORPO; ZeRO 2 and 3",
        status="tested",
        tests=(_TRL + "test_five_steps_equal_one_process",),
        note="evaluation too; [notes](#notes-on-loops-and-trainers)",
    ),
    Row(
        what="TRL 1.16: GRPO and RLOO, generating with transformers; ZeRO 2 and 3",
        status="tested",
        tests=(_COMPLETIONS + "test_four_steps_equal_one_process",),
        note="two replicas, evaluation; [notes](#notes-on-loops-and-trainers)",
    ),
    Row(
        what="GRPO and RLOO with vLLM, Liger, tools, images ...",
        status="refused",
        tests=(_COMPLETIONS + "test_what_was_not_tried_is_refused_by_name",),
        note="by the option's name, at the trainer's start; [notes](#notes-on-loops-and-trainers)",
    ),
    Row(
        what="all other TRL trainers",
        status="refused",
        tests=(
            "tests/integration/trainer/test_trl_refusals.py::test_a_trainer_that_is_not_known_says_so_on_every_rank",
        ),
        note="by the trainer's name, at the start of `train()`; [notes](#notes-on-loops-and-trainers)",
    ),
    _refused("TRL SFT with DFT, label smoothing or `compute_loss_func`", note="by TRL itself"),
    Row(
        what="second call of `Trainer.train()`",
        status="refused",
        tests=("tests/integration/trainer/test_trainer.py::test_a_second_call_of_train_is_refused_by_name",),
        note="the Trainer has released its engine, as in stock DeepSpeed",
    ),
    Row(
        what='any `nn.Module` with `"sequence_parallel_size": 1`',
        status="tested",
        tests=(_ANY + "test_any_module_trains_with_weighted_zero_as_with_equal_partitions",),
        note="weighted ZeRO 1 to 3, straggler report",
    ),
    Row(
        what="replicas of such a module with different batches, ZeRO 0 to 3",
        status="tested",
        tests=(_ANY + "test_replicas_with_different_batches_equal_one_process",),
        note="the loss is a mean over samples",
    ),
    Row(
        what='[`"batch": [6, 2]`](unequal-batches.md) with class weights, penalties ..., ZeRO 0 to 3',
        status="tested",
        tests=(
            _UNLIKE + "test_every_loss_is_that_of_one_process_or_refused_where_it_begins",
            _UNLIKE + "test_losses_on_other_stages",
            "tests/integration/loops/test_unlike_batches.py::test_class_weights_are_those_of_one_process",
        ),
        note="[notes](#notes-on-loops-and-trainers)",
    ),
    Row(
        what='`"batch": [6, 2]` with contrastive losses, Dice, batch statistics ...',
        status="refused",
        tests=(_UNLIKE + "test_every_loss_is_that_of_one_process_or_refused_where_it_begins",),
        note="at the step where it begins; [notes](#notes-on-loops-and-trainers)",
    ),
    Row(
        what="replicas of such a module: unknown loss, batch normalization, `replan`",
        status="refused",
        tests=(_ANY + "test_different_batches_whose_loss_is_not_known_are_refused_by_name",),
    ),
    Row(
        what="such a module with documents, or with losses that count tokens",
        status="refused",
        tests=(_ANY + "test_what_needs_tokens_is_refused_by_name",),
    ),
    Row(what='`train_sampling_strategy="batch_rebalance"`', status="refused", tests=(_LOSSES_REFUSED,)),
    Row(
        what="other trainers whose batches have no labels, or pairs",
        status="refused",
        tests=(_LOSSES_REFUSED,),
        note="by the trainer's name",
    ),
    Row(
        what="custom loops that assemble model inputs from shards",
        status="refused",
        tests=(_SHARDS,),
        note="at the first forward",
    ),
    Row(
        what="[pipelines](pipelines.md): custom loop, HF Trainer, accelerate, TRL",
        status="tested",
        tests=(
            "tests/integration/pipelines/test_pipelines.py::test_unequal_stages_train_as_one_process",
            "tests/integration/loops/test_step_contract.py::test_a_backward_left_out_by_one_stage_of_a_pipeline",
            "tests/integration/pipelines/test_pipelines.py::test_random_plans_train_as_one_process",
            "tests/integration/trainer/test_trainer.py::test_pipelines_train_log_and_save_as_one_process",
            "tests/integration/pipelines/test_pipeline_loops.py::test_accelerates_own_loop_trains_as_one_process",
            "tests/integration/pipelines/test_pipeline_loops.py::test_trl_trains_pipelines_as_one_process",
            "tests/integration/pipelines/test_pipeline_loops.py::test_the_trainer_resumes_pipelines",
        ),
        note="LoRA, tied embeddings, packing",
    ),
    Row(
        what='`"parallel": "full"`: the job searches for pipelines at its start',
        status="tested",
        tests=(
            "tests/integration/pipelines/test_pipeline_start.py::test_a_job_searches_for_its_pipelines_and_trains_as_one_process",
        ),
    ),
    Row(
        what='`"parallel": "best"`: the job chooses between sequences and pipelines at its start',
        status="tested",
        tests=(
            "tests/integration/pipelines/test_best_kind.py::test_a_job_takes_the_faster_kind_and_the_same_loop_trains_as_one_process",
        ),
    ),
    Row(
        what="pipelines of `ds_hetero.empty_model` (meta device)",
        status="tested",
        tests=(
            "tests/integration/pipelines/test_pipeline_weights.py::test_weights_are_read_by_stage",
            "tests/integration/pipelines/test_pipeline_weights.py::test_values_are_drawn_alike_under_every_plan",
        ),
        note="each stage reads or initializes its own weights",
    ),
    Row(
        what="QLoRA in pipelines: 4-bit weights of bitsandbytes, quantized stage by stage",
        status="tested",
        tests=(
            "tests/integration/pipelines/test_pipeline_adapters.py::test_adapters_train_in_stages_as_on_one_process",
            "tests/integration/pipelines/test_pipeline_adapters.py::test_qlora_goes_on_under_another_plan_and_is_saved_as_peft_saves_it",
        ),
        note="stages of one rank, or that share sequences",
    ),
    Row(
        what="pipeline checkpoints, loaded under another plan",
        status="tested",
        tests=(
            "tests/integration/pipelines/test_pipelines.py::test_a_checkpoint_loads_under_every_other_plan",
            "tests/integration/pipelines/test_pipeline_checkpoints.py::test_every_plan_loads_what_every_other_one_saved",
            "tests/integration/pipelines/test_pipeline_checkpoints.py::test_adapters_and_what_they_adapt_load_under_another_plan",
            "tests/integration/pipelines/test_pipeline_checkpoints.py::test_a_checkpoint_becomes_a_folder_without_ranks",
        ),
    ),
    Row(
        what="dropout in tensor-parallel stages: attention, residual stream, LoRA",
        status="tested",
        tests=(
            "tests/integration/pipelines/test_pipeline_dropout.py::test_ranks_of_a_tensor_stage_drop_what_one_process_drops",
            "tests/dist/test_parallel_dropout.py::test_parts_of_a_mask_are_those_of_one_process_and_generators_stay_alike",
        ),
        note='attention dropout needs `attn_implementation="eager"`',
    ),
    Row(
        what="pipelines with `replan`: layers move between stages",
        status="tested",
        tests=(
            "tests/integration/pipelines/test_pipeline_replan.py::test_training_goes_on_as_on_one_process",
            "tests/integration/pipelines/test_pipeline_replan.py::test_a_rank_that_slows_down_loses_layers_within_20_steps",
        ),
        note="stages of one rank, tensor or sequence parallel",
    ),
    Row(what="vLLM, `notebook_launcher`", status="untested"),
    Row(
        what="public recipes of Axolotl, ms-swift, LLaMA-Factory and TRL",
        status="tested",
        tests=("tests/integration/trainer/test_recipes.py::test_frequent_recipes_train_as_on_one_process",),
        note="tiny models, HF and TRL trainers: [results](evidence/framework-recipes.md)",
    ),
    Row(
        what="Axolotl's, ms-swift's and LLaMA-Factory's own trainers",
        status="untested",
        note="Axolotl was [tried by hand](frameworks.md#axolotl)",
    ),
)

_FEATURE_ROWS = (
    Row(
        what="generate and evaluate between steps",
        status="tested",
        tests=(_FEATURES + "test_generation_and_evaluation_between_steps_equal_one_process",),
    ),
    Row(
        what="[self-check](checks.md) (`checks`)",
        status="tested",
        tests=(
            "tests/integration/models/test_self_check.py::test_steps_after_the_check_are_those_without_it_to_the_bit",
        ),
        note="later steps equal to the bit; [notes](#notes-on-features)",
    ),
    Row(what="LoRA on ZeRO-3", status="tested", tests=(_FEATURES + "test_lora_adapters_train_as_on_one_process",)),
    Row(
        what="33 PEFT adapter types and LoRA's settings, ZeRO-2",
        status="tested",
        tests=("tests/integration/models/test_adapters.py::test_kinds_that_are_called_exact_train_as_on_one_process",),
        note="[all adapters](adapters.md)",
    ),
    Row(
        what="gradient checkpointing (recomputation), reentrant or not",
        status="tested",
        tests=(_FEATURES + "test_recomputation_trains_as_on_one_process",),
    ),
    Row(
        what="[attention kept for the backward](loops.md#keep-attention-for-the-backward) (`keep_attention`)",
        status="tested",
        tests=(
            "tests/integration/models/test_kept_attention.py"
            "::test_losses_and_weights_have_the_same_bits_and_the_recomputation_sends_nothing",
        ),
        note="on CPU; refused in pipelines",
    ),
    Row(
        what="[gradients of a ring in bf16](loops.md#gradients-of-a-ring-in-bf16) (`ring_gradients`)",
        status="tested",
        tests=(
            "tests/dist/attention/test_ring_gradients.py"
            "::test_the_error_of_rounded_gradients_is_below_the_bound_that_is_named",
        ),
        note="not exact; the job names the bound of its error",
    ),
    Row(
        what="transformers' `activation_checkpointing_enable(offload=True)`",
        status="tested",
        tests=(_FEATURES + "test_checkpoints_on_the_host_train_as_on_one_process",),
        note="host memory; tested on CPU, without pinned memory",
    ),
    Row(
        what="`engine.compile`, with inductor; beside checkpointed layers and kept attention with `aot_eager`",
        status="tested",
        tests=(
            _COMPILED + "test_a_model_compiled_by_inductor_trains_as_on_one_process",
            _COMPILED + "test_compiled_checkpointed_layers_train_as_on_one_process",
        ),
    ),
    Row(
        what="gradient accumulation, weighted by tokens",
        status="tested",
        tests=(_FEATURES + "test_micro_batches_weighted_by_tokens_train_as_on_one_process",),
    ),
    Row(what="bf16", status="tested", tests=(_FEATURES + "test_bf16_trains_as_on_one_process",)),
    Row(
        what="checkpoints, resumed under another schedule",
        status="tested",
        tests=("tests/integration/models/test_features.py::test_checkpoint_resumes_under_another_schedule",),
    ),
    Row(
        what="[weighted](zero.md) ZeRO-1 and 2",
        status="tested",
        tests=(_ZERO12,),
        note="optimizer offload, clipping, parameter groups",
    ),
    Row(what="[weighted](zero.md) ZeRO-3", status="tested", tests=(_ZERO3,), note="parameter and optimizer offload"),
    Row(
        what="ZeRO-3 sharded within unequal nodes (`zero_within`)",
        status="tested",
        tests=(
            _WITHIN + "test_training_equals_that_of_one_process",
            _WITHIN + "test_between_nodes_only_gradients_travel_and_once_a_step",
        ),
        note="every node holds a copy",
    ),
    Row(
        what="`zero_within` with ZeRO 0 to 2, offload, `elastic` or `experts`",
        status="refused",
        tests=(
            _WITHIN + "test_what_does_not_work_is_refused_by_name_on_every_rank",
            _EXPERTS + "test_what_is_not_built_is_refused_by_name_on_every_rank",
        ),
    ),
    Row(
        what="[experts divided among ranks](experts.md) (`experts`), ZeRO 0 to 3",
        status="tested",
        tests=(
            _EXPERTS + "test_training_equals_one_process",
            _EXPERTS + "test_checkpoints_load_under_other_shares_and_are_those_of_one_process",
            _EXPERTS + "test_bf16_trains_experts_as_one_process_in_bf16",
            _EXPERT_ADAPTERS + "test_adapters_train_beside_and_on_divided_experts_as_on_one_process",
            _TRAINED_EXPERTS + "test_the_trainer_trains_evaluates_saves_and_resumes_as_one_process",
            _TRAINED_EXPERTS + "test_an_accelerate_loop_saves_and_resumes_as_one_process",
            "tests/integration/loops/test_expert_jobs.py::test_random_jobs_equal_one_process",
        ),
        note="any replicas; fp32, or bf16 with ZeRO 1 to 3; LoRA; models of transformers' registry",
    ),
    Row(
        what="`experts` with fp16, bf16 on ZeRO-0, offload, `elastic` or `replan`",
        status="refused",
        tests=(_EXPERTS + "test_what_is_not_built_is_refused_by_name_on_every_rank",),
    ),
    Row(
        what="`deepspeed.zero.Init`, `from_pretrained` under ZeRO-3",
        status="tested",
        tests=("tests/integration/zero/test_zero3.py::test_parameters_made_under_zero_init_are_written_and_trained",),
    ),
    Row(
        what="checkpoints between any ZeRO weights and numbers of ranks",
        status="tested",
        tests=(
            "tests/integration/zero/test_zero12_checkpoints.py::test_every_layout_and_number_of_ranks_loads_every_other",
            "tests/integration/zero/test_zero3_checkpoints.py::test_every_layout_loads_every_checkpoint",
        ),
        note="and stock DeepSpeed",
    ),
    Row(
        what="[re-planning](running.md) while the job runs",
        status="tested",
        tests=("tests/integration/job/test_replan.py::test_a_rank_that_becomes_slow_gets_less_to_do",),
    ),
    Row(
        what="a rank dies",
        status="tested",
        tests=("tests/integration/models/test_features.py::test_dead_rank_is_reported_by_the_others",),
        note="the others stop with one message",
    ),
    _tried("hpZ on equal weights, predivide and prescale, communication in bf16"),
    _tried("CSV monitor, flops profiler, WarmupLR"),
    Row(
        what="tiled MLPs and loss (`tile_tokens`), ZeRO 1 to 3",
        status="tested",
        tests=(
            _TILES + "test_training_in_tiles_equals_one_process_without",
            _TILES + "test_what_a_model_does_to_its_logits_is_in_the_loss_of_a_tile",
        ),
        note="decoders with plain MLPs, not experts; [notes](#notes-on-features)",
    ),
    _tried("TiledMLP on ZeRO-2, `sequence_tiled_compute` on ZeRO-3"),
    _tried("DoRA with `modules_to_save`"),
    Row(
        what="DeepSpeed's TiledFusedLogitsLoss",
        status="refused",
        tests=(_OWN_TERMS + "test_deepspeeds_fused_tiled_loss_is_refused_on_shards_and_works_on_whole_batches",),
        note="use `sequence_tiled_compute`",
    ),
    Row(
        what="settings that differ between ranks",
        status="refused",
        tests=(
            "tests/integration/job/test_registration.py::test_a_difference_between_ranks_is_refused_before_anything_is_built",
        ),
        note="such as `gradient_clipping` or the ZeRO stage",
    ),
    Row(
        what="`torch_autocast`, `torch.autocast`",
        status="tested",
        tests=(_FEATURES + "test_autocast_trains_as_on_one_process",),
        note="losses equal up to bf16 rounding",
    ),
    _fails("TiledMLP on ZeRO-3 where a rank has fewer tokens than tiles", "crash or hang"),
    Row(
        what="weighted ZeRO with Muon, ZenFlow, expert or tensor parallelism, pipelines",
        status="refused",
        tests=(
            "tests/integration/zero/test_zero12.py::test_impossible_combinations_are_refused",
            "tests/integration/zero/test_zero3.py::test_what_needs_equal_shards_is_refused",
        ),
    ),
    _refused("4-D masks, masks with holes, position biases, cross attention"),
    _tried(
        "fp16, ZeRO 0 to 3",
        note="four steps; [notes](#notes-on-features)",
    ),
    _tried("Adafactor on ZeRO 0"),
    _tried("Adafactor on ZeRO 2 and 3", note="equal to stock DeepSpeed on as many ranks; [notes](#notes-on-features)"),
    Row(
        what="Liger (`use_liger_kernel`, or its model patch)",
        status="tested",
        note="with shards and unequal batches; [notes](#notes-on-features)",
        tests=(
            "tests/integration/trainer/test_fused_kernels.py::test_trainer_trains_with_kernels_as_one_process_without",
            "tests/integration/trainer/test_fused_kernels.py::test_own_loops_train_with_kernels_as_one_process_without",
        ),
    ),
    Row(
        what="Cut Cross Entropy: unequal batches, and shards",
        status="tested",
        note="shards need an `apply_lce` that takes `shift_labels`; [notes](#notes-on-features)",
        tests=(
            "tests/integration/trainer/test_fused_kernels.py::test_cut_cross_entropy_trains_where_its_labels_are_in_place",
        ),
    ),
    Row(
        what="Cut Cross Entropy with shards, releases that shift labels",
        status="refused",
        note='`"tile_tokens"` avoids the full logits too',
        tests=(
            "tests/integration/trainer/test_fused_kernels.py::test_unknown_losses_of_kernels_are_refused_with_the_cure",
        ),
    ),
    Row(
        what="Hub kernels (`use_kernels`), FlashAttention 4, flex_attention",
        status="tested",
        note="[notes](#notes-on-features)",
        tests=(
            "tests/integration/trainer/test_fused_kernels.py::test_trainer_trains_with_kernels_as_one_process_without",
            "tests/integration/trainer/test_fused_kernels.py::test_own_loops_train_with_kernels_as_one_process_without",
        ),
    ),
    Row(
        what="GPUs, NCCL, flash-attn and Triton kernels on a GPU",
        status="untested",
        note="beyond [14 minutes on one H200](measured.md#one-h200)",
    ),
    Row(what="Muon with equal weights, DeepSpeed's own activation checkpointing", status="untested"),
)

_HEADS = {"models": "model", "loops": "loop or trainer", "features": "feature"}

TABLES: Mapping[str, Sequence[Row]] = {"models": _MODEL_ROWS, "loops": _LOOP_ROWS, "features": _FEATURE_ROWS}


def render(rows: Sequence[Row], head: str) -> str:
    """Return the rows as a Markdown table; docs/architectures.md lists types. ``head`` names the first column."""
    lines = [f"| {head} | status | remark |", "|---|---|---|"]
    for row in rows:
        status = f"**{row.status}**" if row.status in ("wrong", "fails") else row.status
        types = f": {len(row.types)} types" if row.types else ""
        lines.append(f"| {row.what}{types} | {status} | {row.note} |")
    return "\n".join(lines)


def with_tables(page: Path) -> str:
    """Return the page with every table between its two markers replaced."""
    meanings = (f"| {status} | {meaning} |" for status, meaning in STATUS.items())
    tables = {
        "legend": "\n".join(["| status | meaning |", "|---|---|", *meanings]),
        **{name: render(rows, _HEADS[name]) for name, rows in TABLES.items()},
        "sweep": render_sweep(),
        "planned": render_planned(),
    }
    text = page.read_text()
    for name in PAGES[page]:
        text = with_generated(text, name, tables[name])
    return text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page))
