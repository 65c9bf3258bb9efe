"""Training on packed documents is training on the documents one by one: real tiny models, every backend."""

import pytest
import torch

import swift_vlpack
from swift_vlpack.attention import attention
from swift_vlpack.errors import DataError, IsolationError
from swift_vlpack.text import PackedCollator, block_tokenize
from tests.text.vocabularies import corpus, words

VOCABULARY = 504


def model_of(family, implementation="eager"):
    import transformers

    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 8,
        "initializer_range": 0.2,
    }  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**sizes, attn_implementation=implementation)
    return getattr(transformers, f"{family}ForCausalLM")(config).train()


@pytest.fixture(scope="module")
def tokenizer():
    attention.register()
    return words()


@pytest.fixture(scope="module")
def rows(tokenizer):
    made = block_tokenize({"text": corpus(3, 14, longest=20)}, tokenizer=tokenizer, max_length=48)
    assert 3 <= len(made["input_ids"]) <= 5
    assert len({len(ids) for ids in made["input_ids"]}) > 1, "some are padded"
    return [dict(zip(made, values, strict=True)) for values in zip(*made.values(), strict=True)]


def documents(rows):
    for row in rows:
        ends = [*row["document_starts"][1:], len(row["input_ids"])]
        for start, end in zip(row["document_starts"], ends, strict=True):
            yield row["input_ids"][start:end]


def one_by_one(model, rows):
    """Loss and gradients of the mean over all targets, by forwards of one document each; nothing of ours in them."""
    model.zero_grad()
    total, num_targets = 0.0, sum(len(ids) - 1 for ids in documents(rows))
    for ids in documents(rows):
        tokens = torch.tensor([ids])
        logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum") / num_targets
        loss.backward()
        total += loss.item()
    return total, gradients(model)


def packed(model, batch, **options):
    model.zero_grad()
    loss = model(**batch, **options).loss
    loss.backward()
    return loss.item(), gradients(model)


def gradients(model):
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def difference(one, other):
    assert set(one[1]) == set(other[1])
    return max(abs(one[0] - other[0]), *(float((one[1][name] - other[1][name]).abs().max()) for name in one[1]))


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
@pytest.mark.parametrize("padding", ["longest", 64])
@pytest.mark.parametrize("num_rows", [1, None])
def test_on_our_attention_a_batch_is_its_documents_one_by_one(tokenizer, rows, family, padding, num_rows):
    """TEXT-16: with the model's cache switched on, as it is in a loop of one's own."""
    reference = one_by_one(model_of(family), rows[:num_rows])
    batch = PackedCollator(tokenizer, cu_seqlens=True, padding=padding)(rows[:num_rows])
    assert difference(packed(model_of(family, attention.NAME), batch), reference) < 1e-5


@pytest.mark.parametrize("implementation", ["sdpa", "eager", attention.NAME])
@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_positions_alone_are_enough_where_transformers_reads_them(tokenizer, rows, implementation, family):
    """TEXT-16: without a cache and without a 2-D mask; a batch of several padded rows."""
    reference = one_by_one(model_of(family), rows)
    batch = PackedCollator(tokenizer)(rows)
    model = model_of(family, implementation)
    assert difference(packed(model, batch, use_cache=False), reference) < 1e-5
    leaks = {**batch, "attention_mask": batch["attention_mask"]}
    assert difference(packed(model, leaks, use_cache=False), reference) > 1e-3, "why the mask is not among the inputs"
    assert difference(packed(model, batch), reference) > 1e-3, "why the documentation asks for use_cache=False"


def test_a_trainer_takes_it(tokenizer, rows, tmp_path):
    """TEXT-16: one step of plain gradient descent moves every weight by the gradient of the documents one by one."""
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    rate = 0.5
    model = model_of("Qwen2", attention.NAME)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    loss, wanted = one_by_one(model_of("Qwen2"), rows)
    options = {
        "output_dir": str(tmp_path), "remove_unused_columns": False, "max_steps": 1, "learning_rate": rate,
        "optim": "sgd", "max_grad_norm": 0.0, "report_to": [], "use_cpu": True, "save_strategy": "no",
        "lr_scheduler_type": "constant", "per_device_train_batch_size": 2, "disable_tqdm": True,
        "gradient_accumulation_steps": (len(rows) + 1) // 2, "logging_steps": 1,
    }  # fmt: skip
    arguments = TrainingArguments(**options)
    arguments.max_epochs = None  # ms-swift, once its trainers are loaded, asks every Trainer's arguments for it
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Dataset.from_list(rows),
        data_collator=PackedCollator(tokenizer, cu_seqlens=True),
    )  # fmt: skip
    assert trainer.train().training_loss == pytest.approx(loss, abs=1e-5)
    for name, value in model.named_parameters():
        assert torch.allclose(before[name] - value.detach(), rate * wanted[name], atol=1e-5), name


# -- the proof on a collator ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("implementation", "cache", "options"),
    [
        (attention.NAME, True, {"cu_seqlens": True, "padding": 16, "segment_ids": True}),
        (attention.NAME, False, {}),
        ("sdpa", False, {"padding": 32, "segment_ids": True}),
        ("eager", False, {"train_on_eos": False}),
    ],
)
def test_the_proof_holds_on_the_collator(tokenizer, rows, implementation, cache, options):
    """TEXT-18"""
    model = model_of("Qwen3", implementation)
    model.config.use_cache = cache
    before = {name: value.clone() for name, value in model.state_dict().items()}
    said = swift_vlpack.verify(model, PackedCollator(tokenizer, **options), rows)
    assert said.startswith("isolation verified: max difference 0.0 over 4 samples")
    assert "samples in the whole batch" in said
    assert model.training
    assert model.config._attn_implementation == implementation
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(value.grad is None for value in model.parameters())


def _shifted(collator):
    """Boundaries one token late, positions and all."""

    def collate(rows):
        starts = [[0, *(start + 1 for start in row["document_starts"][1:])] for row in rows]
        moved = [{**row, "document_starts": one} for row, one in zip(rows, starts, strict=True)]
        return {**collator(moved), "labels": collator(rows)["labels"]}

    return collate


@pytest.mark.parametrize(
    ("implementation", "collator", "said"),
    [
        ("sdpa", lambda tokenizer: PackedCollator(tokenizer), "use_cache to False"),
        (attention.NAME, lambda tokenizer: PackedCollator(tokenizer), "use_cache to False"),
        (attention.NAME, lambda tokenizer: PackedCollator(tokenizer, packed_sequences=False), "see each other"),
        (
            attention.NAME,
            lambda tokenizer: PackedCollator(tokenizer, cu_seqlens=True, mask_boundary_loss=False),
            "target",
        ),
        (
            attention.NAME,
            lambda tokenizer: _shifted(PackedCollator(tokenizer, cu_seqlens=True)),
            r"the boundary before sample 2, 3, 4 of the sequence is shifted",
        ),
    ],
)
def test_the_proof_stops_what_leaks(tokenizer, rows, implementation, collator, said):
    """TEXT-18"""
    model = model_of("Qwen2", implementation)
    assert model.config.use_cache, "as it is in a loop of one's own"
    with pytest.raises(IsolationError, match=said):
        swift_vlpack.verify(model, collator(tokenizer), rows)


def test_the_proof_needs_documents_to_look_at(tokenizer):
    """TEXT-18"""
    model = model_of("Qwen2", attention.NAME)
    for rows in (
        [],
        [{"input_ids": [5, 5, 5], "document_starts": [0]}],
        [{"input_ids": [5, 6], "labels": [-100, -100]}],
    ):
        with pytest.raises(DataError, match="no sample with a target"):
            swift_vlpack.verify(model, PackedCollator(tokenizer, cu_seqlens=True), rows)
    one = [{"input_ids": [5, 6, 7, 8]}]
    assert "over 2 samples" in swift_vlpack.verify(model, PackedCollator(tokenizer, cu_seqlens=True), one)
