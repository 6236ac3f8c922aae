"""What works, is refused, is wrong or is untested: the rows of docs/support.md, each with its evidence.

    python -m tests.support_matrix          # writes the tables into docs/support.md

`tests/unit/test_docs_pages.py` checks that the page holds these tables, that every test named here exists, and that
every model of `tests/integration/models/test_models.py` has a row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.integration.architectures import CAUSAL, MASKED
from tests.support import ROOT
from tests.sweep_table import folded, listed, render_sweep

PAGE = ROOT / "docs" / "support.md"

STATUS = {
    "tested": "a test holds it to one process in every run",
    "tried": "equal to one process when it was tried by hand at revision 7d369da or later; no test holds it",
    "self-checked": "outputs and gradients of a short piece equal those of one process, in a test of CI",
    "refused": "stops at the start, or at the first forward, with a message that names the reason",
    "fails": "stops with an error that does not name the reason",
    "wrong": "**wrong today, without an error: do not use it**",
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
        types: of models, as in config.json, which the page folds up below ``what``.
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
_FEATURES = "tests/integration/models/test_features.py::"
_ARGUMENTS = "tests/integration/models/test_forward_arguments.py::"
_PLAIN_LOOP = "tests/integration/loops/test_plain_loop.py::test_training_equals_one_process"
_TRAINER = "tests/integration/trainer/test_trainer.py::test_training_equals_one_process"
_EXAMPLES = "tests/integration/test_examples.py::test_example_trains_alike_on_uneven_ranks_and_in_one_process"
_ZERO12 = "tests/integration/zero/test_zero12.py::test_training_equals_equal_partitions"
_ZERO3 = "tests/integration/zero/test_zero3.py::test_training_equals_that_of_equal_shards"
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
        note=f"by the self-check, at the first batch: {note}",
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
        "a router's auxiliary loss, over the whole replica: Mixtral, Qwen3-MoE and the others whose file has "
        "transformers' `load_balancing_loss_func`",
        "mixtral router loss",
        "qwen3 moe router loss",
        note="over accumulated batches added up under the Trainer and averaged under TRL, as on one process; in loops "
        "of your own weighted as the tokens of its batch",
    ),
    _model(
        "Gemma 2 with soft-capping",
        "gemma2 softcap",
        note="`eager`; left padding that predicts a label reaches the loss, and is told",
    ),
    _model("Gemma 3, text", "gemma3"),
    _model("gpt-oss, with attention sinks", "gpt-oss sinks", note="`eager`; plain, padded, packed"),
    _model("DeepSeek-V3, with latent attention", "deepseek mla"),
    _model(
        "rotary embeddings that depend on the length (`dynamic`, `longrope`)",
        "dynamic rope",
        "longrope",
        note="from the largest position of the whole batch; not inside pipeline stages",
    ),
    _model("BERT, masked language model", "bert"),
    _model("GPT-2", "gpt2"),
    Row(
        what="gated linear attention beside full attention: Qwen3-Next, Qwen3.5 (text), OLMo-Hybrid, Kimi-Linear",
        status="tested",
        tests=(_RECURRENT,),
        note="plain, padded, packed, recomputed; kernels of torch, those of flash-linear-attention are untried",
    ),
    Row(
        what="Mamba-2 beside attention: Bamba, Falcon-H1, Granite hybrid, Nemotron-H, Zamba2",
        status="tested",
        tests=(_RECURRENT,),
        note="likewise; those of mamba-ssm are untried",
    ),
    Row(what="short convolutions beside attention: LFM2", status="tested", tests=(_RECURRENT,)),
    Row(
        what="images before a text decoder: Qwen2.5-VL, Qwen3-VL, Qwen3.5, LLaVA, SmolVLM",
        status="tested",
        tests=(_TOWERS, _TOWERS_CHECKED, _TOWERS_TRAINED),
        note="towers run whole on every rank; plain, padded, recomputed, rotary positions of several axes; videos are "
        "untried",
    ),
    Row(
        what="sounds before a text decoder: Qwen2-Audio, Voxtral",
        status="tested",
        tests=(_TOWERS, _TOWERS_CHECKED),
        note="likewise",
    ),
    Row(
        what="passed by the self-check, tiny and random, fp32 and bf16, plain, packed and padded",
        types=tuple(CAUSAL),
        status="self-checked",
        tests=(_BREADTH,),
        note="types as in config.json; left padding reaches the loss of `gemma2`, `vaultgemma` and the BERT-like ones, "
        "as a warning says",
    ),
    Row(
        what="masked, likewise",
        types=tuple(MASKED),
        status="self-checked",
        tests=(_BREADTH,),
    ),
    _model("OPT, all sizes", "opt", note="positions by its mask, as it counts them"),
    _model(
        "RoBERTa, XLM-R (XL too), X-MOD, CamemBERT, Roberta-PreLayerNorm, Data2Vec-Text, ESM",
        "roberta",
        "roberta decoder",
        "esm",
        note="positions from `padding_idx + 1`, as they count them; padding needs an `attention_mask`",
    ),
    _self_checked("ESM-2 with `token_dropout`", "esm token dropout", note="a share of the sequence"),
    _self_checked("MobileBERT", "mobilebert", note="its embedding reads neighbouring tokens"),
    _self_checked(
        "`ElectraForPreTraining`",
        "electra",
        note="labels are moved although they are in place; `BertForPreTraining`'s second label is refused by name",
    ),
    _self_checked("`GPT2DoubleHeadsModel`", "gpt2 double heads", note="labels are moved twice"),
    _refused("dropout inside attention", "dropout", note="set it to 0"),
    _refused(
        "a router's auxiliary loss, in models with images",
        "router loss with images",
        note="set `router_aux_loss_coef` to 0",
    ),
    Row(
        what="sequence classification and rewards on decoders (`...ForSequenceClassification`), by sharded calls",
        status="tested",
        tests=("tests/integration/loops/test_sharded_call.py::test_a_classifier_trains_as_on_one_process",),
        note="whole batches; a batch of `handle.dataloader` is refused",
    ),
    _refused("heads that pool over the sequence: question answering, multiple choice", "pooling"),
    _refused("classification behind an encoder's pooler", "pooler"),
    _refused("encoder-decoders: T5, BART, M2M, Pegasus ...", "encoder-decoder"),
    _refused("recurrent layers: Mamba, RWKV, RecurrentGemma ...", "recurrent"),
    _refused(
        "state spaces of the first kind: Jamba, Zamba, FalconMamba",
        "state space of the first kind",
        note="the scan of Mamba-1 cannot be split by heads",
    ),
    _refused("chunked attention: Llama 4", "chunks"),
    Row(
        what="aLoRA, Lily, PVeRA, prompt and prefix tuning (PEFT)",
        status="refused",
        tests=(
            "tests/integration/models/test_adapters.py::test_kinds_that_are_called_refused_end_the_start_on_every_rank",
        ),
        note="[all kinds](adapters.md)",
    ),
    _refused(
        "images that see in both directions: Gemma 3 with images, PaliGemma",
        "masks by blocks of images",
        "images before a prefix",
        note="text alone too",
    ),
    _refused("cross attention to images: Mllama", "cross attention to images"),
    _refused("attention of their own: BLOOM, MPT, Falcon, GPT-J, CodeGen, XGLM, DeBERTa, Longformer, BigBird ..."),
    _refused("sparse and indexed attention: DeepSeek-V3.2, GLM-DSA, dots3"),
    _refused("sliding windows in both directions: ModernBERT, NeoMME, UltraBERT", "windows in both directions"),
    _refused("JetMoe", "keys repeated by experts", note="experts share keys"),
    _refused("Doge", "masks by content", note="chooses keys by their content"),
    Row(what="DBRX, Gemma 3n with images (neither is built tiny here)", status="untested"),
)

_LOOP_ROWS = (
    Row(
        what="HF Trainer: one replica, two replicas, a rank without tokens; ZeRO 1 to 3",
        status="tested",
        tests=(_TRAINER, "tests/integration/trainer/test_trainer.py::test_resume_under_another_schedule"),
        note="resumes in mid-epoch under another schedule",
    ),
    Row(
        what="TRL SFTTrainer with packing",
        status="tested",
        tests=("tests/integration/trainer/test_trainer.py::test_trl_trains_packed_documents_as_one_process",),
    ),
    Row(
        what="`placement: documents`: own loop, HF Trainer, flattening collator, TRL packing, padded rows",
        status="tested",
        tests=(
            "tests/integration/loops/test_documents.py::test_a_plain_loop_trains_as_one_process",
            "tests/integration/trainer/test_trainer.py::test_flattened_documents_train_and_resume_as_on_one_process",
            "tests/integration/trainer/test_trainer.py::test_trl_trains_packed_documents_as_one_process",
        ),
    ),
    Row(
        what="accelerate loop: one replica, two replicas",
        status="tested",
        tests=(
            "tests/integration/trainer/test_accelerate.py::test_loop_on_two_ranks_equals_one_process",
            "tests/integration/trainer/test_accelerate.py::test_loop_on_two_replicas_equals_one_process",
        ),
    ),
    Row(what="loop around `deepspeed.initialize`, ZeRO 0 to 3, 2 and 4 ranks", status="tested", tests=(_PLAIN_LOOP,)),
    Row(what="a script for stock Ulysses, unchanged, through `ds_hetero.run`", status="tested", tests=(_EXAMPLES,)),
    Row(
        what="replicas of different size under all three loops",
        status="tested",
        tests=(
            "tests/integration/loops/test_replicas.py::test_a_plain_loop_equals_one_process",
            "tests/integration/loops/test_replicas.py::test_an_accelerate_loop_equals_one_process",
            "tests/integration/loops/test_replicas.py::test_the_trainer_equals_one_process",
        ),
    ),
    Row(
        what="`loss = engine(**batch).loss`, with accelerate too",
        status="tested",
        tests=(
            "tests/integration/loops/test_plain_loop.py::test_the_loss_of_the_outputs_trains_as_on_one_process",
            "tests/integration/trainer/test_accelerate.py::test_loop_on_two_ranks_equals_one_process",
            "tests/integration/models/test_features.py::test_lora_adapters_train_as_on_one_process",
        ),
    ),
    Row(
        what="arguments of a forward, one row for each; `num_items_in_batch`, tuples, batches without labels",
        status="tested",
        tests=(
            _ARGUMENTS + "test_the_sum_over_num_items_in_batch_is_that_of_one_process",
            _ARGUMENTS + "test_what_is_refused_is_named_on_every_rank",
            _ARGUMENTS + "test_a_batch_without_labels_counts_nothing",
            _ARGUMENTS + "test_pipelines_take_these_arguments_alone",
        ),
    ),
    Row(
        what="a loss of the script's own, four conventions",
        status="tested",
        tests=("tests/integration/loops/test_losses.py::test_every_loss_convention_on_every_stage_equals_one_process",),
    ),
    Row(
        what="tests of DeepSpeed and accelerate for their Ulysses",
        status="tested",
        tests=(
            "tests/integration/test_peers.py::test_deepspeeds_own_test_of_ulysses_holds",
            "tests/integration/test_peers.py::test_accelerates_own_test_of_ulysses_holds",
        ),
    ),
    _tried("Trainer: `group_by_length`, IterableDataset, streaming, workers, `auto_find_batch_size`, left padding"),
    _tried("SFT: `bfd`, `bfd_split`, `wrapped`, padding-free, completion only, assistant only, streaming, LoRA"),
    _tried("MoE under SFT with `router_aux_loss_coef=0`"),
    _tried("`accelerate launch --module ds_hetero.run` with TRL's `sft.py`"),
    Row(
        what="a term of the script's own beside the loss, by `handle.mean`",
        status="tested",
        tests=(_OWN_TERMS + "test_a_term_made_by_the_handle_trains_as_on_one_process",),
    ),
    Row(
        what="a term added to the loss without it",
        status="refused",
        tests=(_OWN_TERMS + "test_a_term_of_a_rank_is_refused",),
        note="it would be weighted by ranks, not by tokens",
    ),
    Row(
        what="NEFTune",
        status="tested",
        tests=(_OWN_TERMS + "test_noise_on_embeddings_is_that_of_the_whole_sequence",),
        note="noise of the size of the whole sequence",
    ),
    Row(
        what="a reference model beside the engine, or the trained model in `eval()`, on a batch of `handle.dataloader`",
        status="refused",
        tests=(_SHARDS,),
        note="run them on whole batches, or the trained model in `handle.sharded()`",
    ),
    Row(
        what="label smoothing, `compute_loss_func` (HF Trainer), evaluation over the ranks of a replica",
        status="tested",
        tests=(
            "tests/integration/trainer/test_trainer.py::test_losses_of_all_logits_train_and_evaluate_as_on_one_process",
        ),
        note="every rank holds the logits of whole batches",
    ),
    Row(
        what="losses of whole sequences in a loop, by `handle.sharded_call`; ZeRO 0 to 3, a reference model beside",
        status="tested",
        tests=("tests/integration/loops/test_sharded_call.py::test_a_preference_loss_trains_as_on_one_process",),
    ),
    Row(
        what="TRL 1.16, batches of whole sequences: DPO (a reference model, or the adapter taken off), RewardTrainer "
        "(decoder models), GKD, KTO, CPO, ORPO; ZeRO 2 and 3, evaluation",
        status="tested",
        tests=(_TRL + "test_five_steps_equal_one_process",),
        note="`logits/chosen` and `logits/rejected` of CPO and ORPO are means over padding too, and differ",
    ),
    Row(
        what="TRL 1.16, GRPO and RLOO that generate by transformers: all losses, a reference model or adapters, reward "
        "functions and models, `num_iterations`, streams; ZeRO 2 and 3, two replicas, evaluation",
        status="tested",
        tests=(_COMPLETIONS + "test_four_steps_equal_one_process",),
        note='with `"sequence_parallel_size"` in the configuration: TRL refuses a `ParallelismConfig` itself',
    ),
    Row(
        what="GRPO and RLOO with vLLM, continuous batching, Liger, tools, environments, `rollout_func`, images, or a "
        "loss of routers",
        status="refused",
        tests=(_COMPLETIONS + "test_what_was_not_tried_is_refused_by_name",),
        note="by the option's name, when the trainer is made",
    ),
    Row(
        what="every other trainer of TRL",
        status="refused",
        tests=(
            "tests/integration/trainer/test_trl_refusals.py::test_a_trainer_that_is_not_known_says_so_on_every_rank",
        ),
        note="by the trainer's name, at the start of `train()`; by TRL itself those that need vLLM or an attention "
        "kernel for GPUs where these are missing",
    ),
    _refused("SFT with DFT, label smoothing or `compute_loss_func`", note="by TRL itself"),
    Row(
        what="a second call of `Trainer.train()`",
        status="refused",
        tests=("tests/integration/trainer/test_trainer.py::test_a_second_call_of_train_is_refused_by_name",),
        note="the Trainer has let go of its engine, with stock DeepSpeed too",
    ),
    Row(
        what='any `nn.Module` with `"sequence_parallel_size": 1`: weighted ZeRO 1 to 3, the report of stragglers',
        status="tested",
        tests=(_ANY + "test_any_module_trains_with_weighted_zero_as_with_equal_partitions",),
    ),
    Row(
        what="for such a module, replicas with different batches whose loss is the mean over samples; ZeRO 0 to 3",
        status="tested",
        tests=(_ANY + "test_replicas_with_different_batches_equal_one_process",),
    ),
    Row(
        what='`"batch": [6, 2]` with class weights, ignored labels, sums over positives or boxes, terms of unlike '
        "units, annealed terms, penalties on parameters; own loops and the Trainer's `compute_loss`; ZeRO 0 to 3",
        status="tested",
        tests=(
            _UNLIKE + "test_every_loss_is_that_of_one_process_or_refused_where_it_begins",
            _UNLIKE + "test_losses_on_other_stages",
            "tests/integration/loops/test_unlike_batches.py::test_class_weights_are_those_of_one_process",
        ),
        note="read from the graph of every micro-batch",
    ),
    Row(
        what='`"batch": [6, 2]` with contrastive losses, Dice, batch statistics, mixed samples, buffers that follow '
        "the batch, operations that hide their graph",
        status="refused",
        tests=(_UNLIKE + "test_every_loss_is_that_of_one_process_or_refused_where_it_begins",),
        note="at the step where it begins; mixing by operations that were there before, at the next probe",
    ),
    Row(
        what="for such a module with different batches: a loss that is not known, batch normalization, `replan`",
        status="refused",
        tests=(_ANY + "test_different_batches_whose_loss_is_not_known_are_refused_by_name",),
    ),
    Row(
        what="for such a module, documents, and losses that count tokens",
        status="refused",
        tests=(_ANY + "test_what_needs_tokens_is_refused_by_name",),
    ),
    Row(what='`train_sampling_strategy="batch_rebalance"`', status="refused", tests=(_LOSSES_REFUSED,)),
    Row(
        what="other trainers with loaders without labels, or with pairs",
        status="refused",
        tests=(_LOSSES_REFUSED,),
        note="by the trainer's name",
    ),
    Row(
        what="loops that put the model's inputs together themselves, from shards",
        status="refused",
        tests=(_SHARDS,),
        note="at the first forward",
    ),
    Row(
        what="pipelines of unequal stages: own loop, HF Trainer, accelerate, TRL, LoRA, tied embeddings, packing",
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
    ),
    Row(
        what='`"parallel": "full"`: pipelines searched for at the start of the job',
        status="tested",
        tests=(
            "tests/integration/pipelines/test_pipeline_start.py::test_a_job_searches_for_its_pipelines_and_trains_as_one_process",
        ),
    ),
    Row(
        what="models without weights (`ds_hetero.empty_model`, the meta device), read or drawn by stage",
        status="tested",
        tests=(
            "tests/integration/pipelines/test_pipeline_weights.py::test_weights_are_read_by_stage",
            "tests/integration/pipelines/test_pipeline_weights.py::test_values_are_drawn_alike_under_every_plan",
        ),
    ),
    Row(
        what="checkpoints of pipelines under another plan",
        status="tested",
        tests=(
            "tests/integration/pipelines/test_pipelines.py::test_a_checkpoint_loads_under_every_other_plan",
            "tests/integration/pipelines/test_pipeline_checkpoints.py::test_every_plan_loads_what_every_other_one_saved",
            "tests/integration/pipelines/test_pipeline_checkpoints.py::test_adapters_and_what_they_adapt_load_under_another_plan",
            "tests/integration/pipelines/test_pipeline_checkpoints.py::test_a_checkpoint_becomes_a_folder_without_ranks",
        ),
    ),
    Row(
        what="dropout in tensor stages, of attention, of the residual stream and of LoRA",
        status="tested",
        tests=(
            "tests/integration/pipelines/test_pipeline_dropout.py::test_ranks_of_a_tensor_stage_drop_what_one_process_drops",
            "tests/dist/test_cut_dropout.py::test_parts_of_a_mask_are_those_of_one_process_and_generators_stay_alike",
        ),
        note='attention with `attn_implementation="eager"`',
    ),
    Row(
        what="pipelines with `replan`: layers move between stages of one rank, tensor and sequence parallelism",
        status="tested",
        tests=(
            "tests/integration/pipelines/test_pipeline_replan.py::test_training_goes_on_as_on_one_process",
            "tests/integration/pipelines/test_pipeline_replan.py::test_a_rank_that_slows_down_loses_layers_within_20_steps",
        ),
    ),
    Row(what="vLLM, `notebook_launcher`", status="untested"),
    Row(
        what="public recipes of Axolotl, ms-swift, LLaMA-Factory and TRL, shrunk",
        status="tested",
        tests=("tests/integration/trainer/test_recipes.py::test_frequent_recipes_train_as_on_one_process",),
        note="by transformers' and TRL's trainers; which are exact or refused: [frameworks](frameworks.md)",
    ),
    Row(
        what="trainers of Axolotl, ms-swift and LLaMA-Factory themselves",
        status="untested",
        note="Axolotl by hand: [frameworks](frameworks.md)",
    ),
)

_FEATURE_ROWS = (
    Row(
        what="generate and evaluate between steps",
        status="tested",
        tests=(_FEATURES + "test_generation_and_evaluation_between_steps_equal_one_process",),
    ),
    Row(
        what="the self-check (`checks`) leaves no trace: steps to the bit on ZeRO 0 to 3, LoRA, recomputation of both "
        "kinds, dropout, experts, bf16",
        status="tested",
        tests=(
            "tests/integration/models/test_self_check.py::test_steps_after_the_check_are_those_without_it_to_the_bit",
        ),
    ),
    Row(what="LoRA on ZeRO-3", status="tested", tests=(_FEATURES + "test_lora_adapters_train_as_on_one_process",)),
    Row(
        what="33 kinds of adapters of PEFT, and the settings of LoRA, on ZeRO-2",
        status="tested",
        tests=("tests/integration/models/test_adapters.py::test_kinds_that_are_called_exact_train_as_on_one_process",),
        note="[all kinds](adapters.md)",
    ),
    Row(
        what="gradient checkpointing, reentrant or not",
        status="tested",
        tests=(_FEATURES + "test_recomputation_trains_as_on_one_process",),
    ),
    Row(
        what="activation checkpoints on the host: `activation_checkpointing_enable(offload=True)` of transformers",
        status="tested",
        tests=(_FEATURES + "test_checkpoints_on_the_host_train_as_on_one_process",),
        note="on CPU, where nothing is pinned",
    ),
    Row(
        what="`engine.compile`, backend `aot_eager`",
        status="tested",
        tests=(_FEATURES + "test_a_compiled_model_trains_as_on_one_process",),
    ),
    Row(
        what="gradient accumulation, weighted by tokens",
        status="tested",
        tests=(_FEATURES + "test_micro_batches_weighted_by_tokens_train_as_on_one_process",),
    ),
    Row(what="bf16", status="tested", tests=(_FEATURES + "test_bf16_trains_as_on_one_process",)),
    Row(
        what="checkpoints that resume under another schedule",
        status="tested",
        tests=("tests/integration/models/test_features.py::test_checkpoint_resumes_under_another_schedule",),
    ),
    Row(
        what="ZeRO-1 and 2 by weights, with offload of the optimizer, clipping, parameter groups",
        status="tested",
        tests=(_ZERO12,),
    ),
    Row(what="ZeRO-3 by weights, with offload of parameters and optimizer", status="tested", tests=(_ZERO3,)),
    Row(
        what="ZeRO-3 inside unequal nodes, copied across them (`zero_within`)",
        status="tested",
        tests=(
            _WITHIN + "test_training_equals_that_of_one_process",
            _WITHIN + "test_between_nodes_only_gradients_travel_and_once_a_step",
        ),
    ),
    Row(
        what="`zero_within` with ZeRO 0 to 2, offload, `elastic`",
        status="refused",
        tests=(_WITHIN + "test_what_does_not_work_is_refused_by_name_on_every_rank",),
    ),
    Row(
        what="`deepspeed.zero.Init`, `from_pretrained` under ZeRO-3",
        status="tested",
        tests=("tests/integration/zero/test_zero3.py::test_parameters_made_under_zero_init_are_written_and_trained",),
    ),
    Row(
        what="checkpoints between any weights, any number of ranks, and stock",
        status="tested",
        tests=(
            "tests/integration/zero/test_zero12_checkpoints.py::test_every_layout_and_number_of_ranks_loads_every_other",
            "tests/integration/zero/test_zero3_checkpoints.py::test_every_layout_loads_every_checkpoint",
        ),
    ),
    Row(
        what="re-planning while the job runs",
        status="tested",
        tests=("tests/integration/job/test_replan.py::test_a_rank_that_becomes_slow_gets_less_to_do",),
    ),
    Row(
        what="a rank that dies: the others stop with one message",
        status="tested",
        tests=("tests/integration/models/test_features.py::test_dead_rank_is_reported_by_the_others",),
    ),
    _tried(
        "hpZ on equal weights, predivide and prescale, communication in bf16, CSV monitor, flops profiler, WarmupLR"
    ),
    Row(
        what="MLPs and the loss in tiles (`tile_tokens`), ZeRO 1 to 3, recomputation, a rank without tokens",
        status="tested",
        tests=(
            _TILES + "test_training_in_tiles_equals_one_process_without",
            _TILES + "test_what_a_model_does_to_its_logits_is_in_the_loss_of_a_tile",
        ),
        note="decoders with plain MLPs; experts are refused",
    ),
    _tried("TiledMLP on ZeRO-2, `sequence_tiled_compute` on ZeRO-3"),
    _tried("DoRA with `modules_to_save`"),
    Row(
        what="TiledFusedLogitsLoss, DeepSpeed's fused tiles of logits and loss",
        status="refused",
        tests=(_OWN_TERMS + "test_deepspeeds_fused_tiled_loss_is_refused_on_shards_and_works_on_whole_batches",),
        note="use `sequence_tiled_compute`",
    ),
    Row(
        what="a `gradient_clipping`, ZeRO stage or other setting that differs between ranks",
        status="refused",
        tests=(
            "tests/integration/job/test_registration.py::test_a_difference_between_ranks_is_refused_before_anything_is_built",
        ),
    ),
    Row(
        what="`torch_autocast`, `torch.autocast`",
        status="tested",
        tests=(_FEATURES + "test_autocast_trains_as_on_one_process",),
        note="losses to the rounding of bf16",
    ),
    _fails("TiledMLP on ZeRO-3 where a rank has fewer tokens than tiles", "crash or hang"),
    Row(
        what="with unequal ZeRO weights: Muon, ZenFlow, expert-parallel groups, tensor parallelism, pipelines",
        status="refused",
        tests=(
            "tests/integration/zero/test_zero12.py::test_impossible_combinations_are_refused",
            "tests/integration/zero/test_zero3.py::test_what_needs_equal_shards_is_refused",
        ),
    ),
    _refused("4-D masks, masks with holes, position biases, cross attention"),
    _tried(
        "fp16, ZeRO 0 to 3",
        note="four steps; DeepSpeed refuses it on CPUs without instructions for fp16, and was made to let it pass",
    ),
    _tried(
        "Adafactor on ZeRO 0; on ZeRO 2 and 3 it is what stock DeepSpeed trains on as many ranks, which is not what "
        "one process without ZeRO does",
        note="ZeRO hands flattened parameters to an optimizer that looks at whole matrices",
    ),
    Row(
        what="Liger (`use_liger_kernel`, or its patch of a model), with shards and with unequal batches",
        status="tested",
        note="its formulas in the place of its kernels, which run on GPUs alone; its loss of a shard is a mean over "
        'the rank\'s own labels, which the Trainer\'s hook knows, and an own loop says by `"loss": "local_mean"`',
        tests=(
            "tests/integration/trainer/test_fused_kernels.py::test_trainer_trains_with_kernels_as_one_process_without",
            "tests/integration/trainer/test_fused_kernels.py::test_own_loops_train_with_kernels_as_one_process_without",
        ),
    ),
    Row(
        what="Cut Cross Entropy with unequal batches; with shards from the release on whose `apply_lce` takes "
        "`shift_labels`",
        status="tested",
        note="likewise its formula",
        tests=(
            "tests/integration/trainer/test_fused_kernels.py::test_cut_cross_entropy_trains_where_its_labels_are_in_place",
        ),
    ),
    Row(
        what="Cut Cross Entropy with shards, in releases that move the labels themselves",
        status="refused",
        note='`"tile_tokens"` makes the loss without all logits, too',
        tests=(
            "tests/integration/trainer/test_fused_kernels.py::test_unknown_losses_of_kernels_are_refused_with_the_cure",
        ),
    ),
    Row(
        what="kernels of the Hub (`use_kernels`, or an attention by its repository), FlashAttention 4, flex_attention",
        status="tested",
        note="layers that work token by token run as they are; attention of shards is this engine's, and a model that "
        "runs whole has the kernel that was asked for",
        tests=(
            "tests/integration/trainer/test_fused_kernels.py::test_trainer_trains_with_kernels_as_one_process_without",
            "tests/integration/trainer/test_fused_kernels.py::test_own_loops_train_with_kernels_as_one_process_without",
        ),
    ),
    Row(what="GPUs, NCCL, flash-attn and Triton kernels on a GPU", status="untested"),
    Row(what="Muon with equal weights, DeepSpeed's own activation checkpointing", status="untested"),
)

TABLES: Mapping[str, Sequence[Row]] = {"models": _MODEL_ROWS, "loops": _LOOP_ROWS, "features": _FEATURE_ROWS}


def render(rows: Sequence[Row]) -> str:
    """A Markdown table."""
    lines = ["| what | today | remark |", "|---|---|---|"]
    for row in rows:
        files = dict.fromkeys(test.partition("::")[0].removeprefix("tests/") for test in row.tests)
        remarks = [row.note] if row.note else []
        remarks += [", ".join(f"`{file}`" for file in files)] if files else []
        status = f"**{row.status}**" if row.status in ("wrong", "fails") else row.status
        types = f" {folded(f'{len(row.types)} types', listed(row.types))}" if row.types else ""
        lines.append(f"| {row.what}{types} | {status} | {'; '.join(remarks)} |")
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """The page with every table between its two markers replaced."""
    legend = "\n".join(["| word | meaning |", "|---|---|", *(f"| {word} | {text} |" for word, text in STATUS.items())])
    tables = {name: render(rows) for name, rows in TABLES.items()}
    for name, table in {"legend": legend, **tables, "sweep": render_sweep()}.items():
        pattern = rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)"
        page, count = re.subn(pattern, lambda match, text=table: f"{match[1]}{text}\n{match[2]}", page, flags=re.DOTALL)
        assert count == 1, f"docs/support.md has {count} places for the table {name!r}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
