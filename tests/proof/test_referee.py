"""The proof on models and collators of anybody: right ones pass, and what is wrong with others is said of them."""

import re
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import swift_vlpack
from benchmarks import collators as benchmark
from swift_vlpack.attention import attention
from swift_vlpack.errors import DataError, IsolationError
from swift_vlpack.proof import handed
from swift_vlpack.proof.verify import verify
from swift_vlpack.testing import assert_isolated
from tests import family_models, tiny
from tests.proof import collators as c

FAMILIES = (*c.GRIDS, c.INTERN, c.TEXT)
WITH_IMAGES = (*c.GRIDS, c.INTERN)


def mostly_slow(families):
    """All of these, of which make test takes those that differ most."""
    marks = [pytest.mark.slow, pytest.mark.telling]
    return [one if one in ("qwen2_5_vl", c.INTERN, c.TEXT) else pytest.param(one, marks=marks) for one in families]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """`model(family, implementation)`: the same object for the same arguments, because nothing may change it."""
    attention.register()
    made = {}

    def get(family, implementation="sdpa"):
        key = family, implementation
        if key not in made:
            made[key] = c.model_of(family, tmp_path_factory.mktemp(family), implementation)
        return made[key]

    return get


def failing(model, collator, samples=None):
    """The message and the cause."""
    with pytest.raises(IsolationError) as caught:
        verify(model, collator, samples or c.samples_of(model))
    return str(caught.value), caught.value.cause


# -- right ones -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_right_collator_is_verified_and_model_is_left_as_it_was(model, family):
    """REF-1 REF-2"""
    of_family = model(family)
    before = {name: value.clone() for name, value in of_family.state_dict().items()}
    said = swift_vlpack.verify(of_family, c.Flat(of_family), c.samples_of(of_family))
    assert said.startswith("isolation verified: max difference 0.0 over ")
    assert "attention sdpa (packed equals" in said
    assert f"so do {len(c.samples_of(of_family))} samples in the whole batch" in said
    assert of_family.training
    assert of_family.config._attn_implementation == "sdpa"
    assert all(torch.equal(value, before[name]) for name, value in of_family.state_dict().items())
    assert all(value.grad is None for value in of_family.parameters())


RIGHT = {
    "4-D mask of yes and no": ("sdpa", [c.running_positions, c.mask_of_pairs]),
    "4-D mask that is added": ("sdpa", [c.running_positions, c.added_mask]),
    "4-D mask, eager": ("eager", [c.added_mask]),
    "boundaries": (attention.NAME, [c.running_positions, c.boundaries]),
}


@pytest.mark.parametrize("family", ["qwen2_5_vl", c.INTERN])
@pytest.mark.parametrize("way", RIGHT)
def test_every_way_to_tell_where_samples_start_is_verified(model, family, way):
    """REF-2: positions may run on over the row, where something else keeps samples apart."""
    implementation, changes = RIGHT[way]
    of_family = model(family, implementation)
    assert_isolated(of_family, c.Flat(of_family, *changes), c.samples_of(of_family))


@pytest.mark.parametrize("on_the_left", [False, True])
@pytest.mark.parametrize("family", mostly_slow(FAMILIES))
def test_padded_batch_is_verified(model, family, on_the_left):
    """REF-2: samples in rows of their own, with padding on either side."""
    of_family = model(family)
    samples = c.samples_of(of_family)
    assert_isolated(of_family, lambda some: c.padded(some, of_family, on_the_left=on_the_left), samples)


# -- wrong ones -------------------------------------------------------------------------------------------------------

NOT_APART = {
    "nothing tells": ([c.without("position_ids"), c.with_types], "nothing in the batch tells where samples start"),
    "positions run on": ([c.running_positions], "positions run over the whole row and begin again at no sample"),
    "index mask": ([c.running_positions, c.index_mask], "numbers the samples, and attention sdpa reads it as a mask"),
    "mask beside positions": ([c.ones], "it does so only where there is no attention_mask"),
    "one boundary lost": ([c.lost_at_the_third], "positions begin again at some samples only"),
    "leaking mask": ([c.leaking_mask], "mask lets tokens of sample 3 of the sequence see sample 2"),
    "boundaries not read": (
        [c.running_positions, c.boundaries], "boundaries are in cu_seq_lens_q, which attention sdpa does not read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", mostly_slow(FAMILIES))
@pytest.mark.parametrize("way", NOT_APART)
def test_samples_that_see_each_other_are_explained_by_the_batch(model, family, way):
    """REF-3 REF-4"""
    changes, wanted = NOT_APART[way]
    of_family = model(family)
    said, cause = failing(of_family, c.Flat(of_family, *changes))
    assert wanted in cause
    assert "see each other" in said
    assert "attn_impl" not in said, "an option of our own trainer"


@pytest.mark.parametrize("family", c.GRIDS)
def test_positions_without_text_axis_are_named(model, family):
    """REF-4"""
    of_family = model(family)
    assert "three axes (time, height, width)" in failing(of_family, c.Flat(of_family, c.three_axes))[1]


def test_cache_is_named(model):
    """REF-4"""
    of_family = model(c.TEXT)
    c.use_cache(of_family, yes=True)
    try:
        assert "set model.config.use_cache to False" in failing(of_family, c.Flat(of_family))[1]
    finally:
        c.use_cache(of_family, yes=False)


@pytest.mark.parametrize("family", c.GRIDS)
def test_flat_positions_are_named_where_the_model_has_three_axes(model, family):
    """REF-3 REF-5: the collator gives them to a sample alone, too; the model itself would make others."""
    of_family = model(family)
    cause = failing(of_family, c.Flat(of_family, c.flat_positions))[1]
    assert "positions of sample 1 in the sequence are not those that it has alone" in cause
    assert "the same on all three axes, because position_ids of the batch are 2-D" in cause


@pytest.mark.parametrize("family", c.GRIDS[:2])
def test_flat_positions_of_texts_are_named_where_the_model_finds_no_samples_by_them(model, family):
    """REF-4: Qwen3-VL reads 2-D positions, the others do not, and the loss looks normal on all."""
    of_family = model(family)
    texts = [sample for sample in c.samples_of(of_family) if "pixel_values" not in sample]
    assert (
        "they are 2-D, and it takes the first of four axes"
        in failing(of_family, c.Flat(of_family, c.flat_positions), texts)[1]
    )
    assert_isolated(model("qwen3_vl"), c.Flat(model("qwen3_vl"), c.flat_positions), texts)


def test_positions_that_nobody_can_make_are_named(model):
    """REF-5: a padded batch without the kinds of tokens."""
    of_family = model("qwen2_5_vl")

    def collate(samples):
        return {name: value for name, value in c.padded(samples, of_family).items() if name != "mm_token_type_ids"}

    assert "only of mm_token_type_ids and grids" in failing(of_family, collate)[1]


@pytest.mark.parametrize("family", mostly_slow(FAMILIES))
def test_labels_over_a_boundary_are_named(model, family):
    """REF-3"""
    of_family = model(family)
    cause = failing(of_family, c.Flat(of_family, c.all_labels))[1]
    assert "the first token of sample 2 is a target of the sample before it" in cause
    assert "labels of sample" in failing(of_family, c.Flat(of_family, c.shifted_labels))[1]


@pytest.mark.parametrize("family", mostly_slow(WITH_IMAGES))
def test_exchanged_images_are_named(model, family):
    """REF-3: also if they are of one size."""
    of_family = model(family)
    collator = c.Flat(of_family, c.exchanged_images)
    assert "media are exchanged" in failing(of_family, collator)[1]
    image, text, other, *_ = c.samples_of(of_family)
    assert "media are exchanged" in failing(of_family, collator, [image, text, other])[1]


@pytest.mark.parametrize("family", mostly_slow(WITH_IMAGES))
def test_lost_images_are_named(model, family):
    """REF-3"""
    of_family = model(family)
    collator = c.Flat(of_family, c.axes_of_text, c.without("pixel_values", "image_grid_thw"))
    assert "media do not reach the model" in failing(of_family, collator)[1]


def test_boundaries_that_are_shifted_are_named(model):
    """REF-3"""
    of_family = model(c.TEXT, attention.NAME)
    cause = failing(of_family, c.Flat(of_family, c.shifted_boundaries))[1]
    assert cause.startswith("the boundary before sample 2, 3, 4 of the sequence is shifted")


def test_tokens_that_are_cut_are_named(model):
    """REF-3"""
    of_family = model("qwen2_5_vl")
    said, cause = failing(of_family, c.Flat(of_family, c.without_the_last_token))
    assert cause == "the sequence is not its samples"
    assert "are not in the batch in one piece: the collator cut, dropped or changed them" in said


def gemma():
    """A sliding window in one of two layers, and soft caps, which sdpa drops."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 480, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    layers = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "use_cache": False}
    made = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, **layers, **heads)).train()
    made.set_attn_implementation("eager")
    return made


def gpt():
    """Embeddings of positions, in place of rotary ones."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 480, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "use_cache": False}
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ids)).train()


def test_what_a_model_asks_of_its_mask_is_named():
    """REF-4: the mask of the batch would be right for a model without a window."""
    of_family, texts = gemma(), [c.text_sample(length, length) for length in (13, 9, 21, 17)]
    assert_isolated(of_family, c.Flat(of_family), texts)
    cause = failing(of_family, c.Flat(of_family, c.added_mask), texts)[1]
    assert re.search("samples differ from token [56] on", cause)


def test_positions_that_are_embedded_are_named():
    """REF-4"""
    of_family, texts = gpt(), [c.text_sample(length, length) for length in (13, 9, 21, 17)]
    assert_isolated(of_family, c.Flat(of_family), texts)
    wrong = c.Flat(of_family, c.running_positions, c.added_mask)
    assert "positions that the model embeds" in failing(of_family, wrong, texts)[1]
    on_the_left = partial(c.padded, model=of_family, on_the_left=True)
    assert "positions that the model embeds" in failing(of_family, on_the_left, texts)[1]


# -- samples of any kind ----------------------------------------------------------------------------------------------


def vowels(text):
    """Tokens of a text: its letters."""
    return [10 + ord(letter) for letter in text]


@pytest.mark.parametrize(("changes", "wanted"), [([], None), ([c.running_positions], "run over the whole row")])
def test_samples_may_be_texts_that_the_collator_encodes(model, changes, wanted):
    """REF-6"""
    of_family = model(c.TEXT)
    flat = c.Flat(of_family, *changes)

    def collate(samples):
        ids = [vowels(sample["text"]) for sample in samples]
        return flat([{"input_ids": tokens, "labels": tokens} for tokens in ids])

    samples = [{"text": text} for text in ("a picture of a house", "hello there", "what is it", "a tree")]
    if wanted is None:
        assert_isolated(of_family, collate, samples)
    else:
        assert wanted in failing(of_family, collate, samples)[1]


@pytest.mark.parametrize("is_exchanged", [False, True])
def test_samples_may_have_pictures_that_the_collator_decodes(model, is_exchanged):
    """REF-6"""
    of_family = model(c.INTERN)
    flat = c.Flat(of_family, *([c.exchanged_images] if is_exchanged else []))

    def collate(samples):
        made = []
        for sample in samples:
            fields = {name: value for name, value in sample.items() if name != "images"}
            if sample.pop("images", None):  # as LLaMA-Factory's does
                pixels = [torch.frombuffer(bytearray(one.tobytes()), dtype=torch.uint8) for one in fields.pop("was")]
                fields["pixel_values"] = torch.stack(
                    [one.reshape(56, 56, 3).permute(2, 0, 1) / 255.0 for one in pixels]
                )
            made.append(fields)
        return flat(made)

    def with_pictures(sample, color):
        return {**sample, "images": True, "was": [Image.new("RGB", (56, 56), color)]}

    image, text, other, *_ = (
        {name: value for name, value in one.items() if name != "pixel_values"} for one in c.samples_of(of_family)
    )
    samples = [with_pictures(image, (200, 10, 40)), text, with_pictures(other, (3, 90, 250))]
    if is_exchanged:
        assert "media are exchanged" in failing(of_family, collate, samples)[1]
    else:
        assert_isolated(of_family, collate, samples)


def message(text, answer, *sizes, seed=0):
    """A row of chat with pictures of (height, width), as a processor takes it."""
    noise = np.random.default_rng(seed)
    pictures = [Image.fromarray(noise.integers(0, 255, (*size, 3), dtype=np.uint8)) for size in sizes]
    parts = [*({"type": "image", "image": one} for one in pictures), {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]}


def encoded(processor, row):
    """By transformers' own processor; the answer is learnt."""
    user, assistant = row["messages"]
    images = [part["image"] for part in user["content"] if part["type"] == "image"]
    marks = "<|vision_start|><|image_pad|><|vision_end|>" * len(images)
    question = f"<|im_start|>user\n{marks}{user['content'][-1]['text']}<|im_end|>\n<|im_start|>assistant\n"
    made = processor(text=[f"{question}{assistant['content']}<|im_end|>"], images=images or None, return_tensors="pt")
    ids, num_learnt = made["input_ids"][0].tolist(), len(processor.tokenizer(assistant["content"])["input_ids"]) + 1
    fields = {"input_ids": ids, "labels": [c.IGNORED] * (len(ids) - num_learnt) + ids[-num_learnt:]}
    return fields | {name: made[name] for name in ("pixel_values", "image_grid_thw") if name in made}


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ([], None),
        ([c.running_positions], "run over the whole row"),
        ([c.exchanged_images], "media are exchanged"),
    ],
)
def test_samples_may_be_messages_with_pictures_that_a_processor_encodes(model, changes, wanted):
    """REF-6: by the processor of transformers, of pictures of several sizes, two in one sample."""
    of_family = model("qwen2_5_vl")
    processor = tiny.build_processor(tiny.build_tokenizer("qwen2_5_vl", is_small=True), "qwen2_5_vl")
    flat = c.Flat(of_family, *changes)
    rows = [
        message("what is this", "a small red house", (56, 56)),
        message("hello there", "how are you"),
        message("describe", "a tree near the street", (56, 84), (84, 56), seed=1),
        message("caption", "the sky is blue", (56, 56), seed=2),
    ]

    def collate(samples):
        return flat([encoded(processor, row) for row in samples])

    if wanted is None:
        assert_isolated(of_family, collate, rows)
    else:
        assert wanted in failing(of_family, collate, rows)[1]


def in_order_of_length(flat, samples):
    return flat(sorted(samples, key=lambda sample: len(sample["input_ids"])))


def with_ends(flat, samples):
    """A token in front of each sample, and one behind it that is learnt."""
    ids = [[5, *sample["input_ids"], 6] for sample in samples]
    labels = [[c.IGNORED, *sample["labels"], 6] for sample in samples]
    added = zip(samples, ids, labels, strict=True)
    return flat([{**sample, "input_ids": tokens, "labels": targets} for sample, tokens, targets in added])


def in_arrays(flat, samples):
    return {name: value.numpy() for name, value in flat(samples).items()}


@pytest.mark.parametrize("collate", [in_order_of_length, with_ends, in_arrays])
def test_collators_may_sort_add_and_give_arrays(model, collate):
    """REF-2"""
    of_family = model("qwen2_5_vl")
    assert_isolated(of_family, partial(collate, c.Flat(of_family)), c.samples_of(of_family))
    assert "run over the whole row" in failing(of_family, partial(collate, c.Flat(of_family, c.running_positions)))[1]


@pytest.mark.parametrize("count", [1, 2])
def test_few_samples_are_enough(model, count):
    """REF-2: one is given a twin, and a neighbour."""
    of_family = model("qwen2_5_vl")
    samples = c.samples_of(of_family)[:count]
    assert_isolated(of_family, c.Flat(of_family), samples)
    assert "run over the whole row" in failing(of_family, c.Flat(of_family, c.running_positions), samples)[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, "autocast"])
def test_half_precision_is_compared_in_float32_too(tmp_path, dtype):
    """REF-3 ISO-16"""
    of_family = c.model_of("qwen2_5_vl", tmp_path)
    options = {}
    if dtype == "autocast":
        options["forward_context"] = lambda: torch.autocast("cpu", torch.bfloat16)
    else:
        of_family = of_family.to(dtype)
    samples = c.samples_of(of_family)
    assert "in float32 packed equals" in verify(of_family, c.Flat(of_family), samples, **options)
    with pytest.raises(IsolationError, match="run over the whole row"):
        verify(of_family, c.Flat(of_family, c.running_positions), samples, **options)


def test_helper_for_tests_raises_what_pytest_shows(model):
    """REF-7"""
    of_family = model(c.TEXT)
    with pytest.raises(AssertionError, match="positions run over the whole row"):
        assert_isolated(of_family, c.Flat(of_family, c.running_positions), c.samples_of(of_family))


def test_what_cannot_be_compared_is_said(model):
    """REF-8"""
    of_family = model(c.TEXT)
    flat, samples = c.Flat(of_family), c.samples_of(of_family)
    for collate, wanted in (
        (lambda some: {"labels": flat(some)["labels"]}, "made no input_ids"),
        (lambda some: {"input_ids": flat(some)["input_ids"]}, "made no labels"),
        (
            lambda some: {name: torch.cat([value] * 2) for name, value in flat(some).items()},
            "2 rows .*of sample 1",
        ),
    ):
        with pytest.raises(DataError, match=wanted):
            verify(of_family, collate, samples)
    for few in ([], [{"input_ids": [5, 5], "labels": [5, 5]}], [{"input_ids": [5, 6], "labels": [-100, -100]}]):
        with pytest.raises(DataError, match="verify found no sample with a target and two different tokens of text"):
            verify(of_family, flat, few)


def test_referee_needs_no_ms_swift():
    """REF-7"""
    code = (
        "import sys; sys.modules['swift'] = None; import swift_vlpack.testing as t; print(t.assert_isolated.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "assert_isolated"


def test_examples_of_reasons():
    """REF-4"""
    import doctest

    assert doctest.testmod(handed).failed == 0


# -- more families ----------------------------------------------------------------------------------------------------


def by_processor(processor, text, picture):
    """A sample as the family's own processor makes it; the end of the text is learnt."""
    mark = (getattr(processor, "boi_token", None) or processor.image_token) if picture else ""
    made = processor(text=[mark + text], images=[[picture]] if picture else None, return_tensors="pt")
    ids = made["input_ids"][0].tolist()
    fields = {name: value for name, value in made.items() if name != "attention_mask"}
    return {**fields, "input_ids": ids, "labels": [c.IGNORED] * (len(ids) - 4) + ids[-4:]}


def end_to_end(samples, *, tells=True, is_reversed=False):
    """All fields one after the other: those with a number for each token along the row, media along the batch."""
    lengths = c.lengths_of(samples)
    tokens, labels = ([number for one in samples for number in one[name]] for name in ("input_ids", "labels"))
    made = {"input_ids": torch.tensor([tokens]), "labels": torch.tensor([labels])}
    made["labels"][0, [0, *np.cumsum(lengths)[:-1].tolist()]] = c.IGNORED
    for name in dict.fromkeys(name for one in samples for name in one if name not in made):
        values = [one[name] for one in samples if name in one]
        is_of_tokens = [value.shape[1:] for value in values] == [(length,) for length in lengths]
        made[name] = torch.cat(values, dim=1 if is_of_tokens else 0)
    if is_reversed and "pixel_values" in made:
        made["pixel_values"] = made["pixel_values"].flip(0)
    return made | ({"position_ids": torch.cat([torch.arange(length) for length in lengths])[None]} if tells else {})


@pytest.mark.slow
@pytest.mark.telling
@pytest.mark.parametrize("name", ["LLaVA 1.5 (HF)", "Gemma 3", "Mistral 3", "Idefics3", "LLaVA-OneVision (HF)"])
def test_more_families_are_judged_by_the_same_collator(name, tmp_path):
    """REF-1 REF-3: tiles, masks of pixels, sizes beside them, tokens of an image that see each other."""
    family_models.FAMILIES[name].build(tmp_path)
    processor = transformers.AutoProcessor.from_pretrained(tmp_path)
    of_family = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="sdpa").train()
    c.use_cache(of_family, yes=False)
    noise = np.random.default_rng(0)
    pictures = [Image.fromarray(noise.integers(0, 255, (56, 56, 3), dtype=np.uint8)) for _ in range(2)]
    samples = [
        by_processor(processor, "a small red house near the street", pictures[0]),
        by_processor(processor, "hello how are you there", None),
        by_processor(processor, "a tall tree and the sky is blue", pictures[1]),
        by_processor(processor, "what is it there", None),
    ]
    assert_isolated(of_family, end_to_end, samples)
    assert "nothing in the batch tells" in failing(of_family, partial(end_to_end, tells=False), samples)[1]
    assert "media are exchanged" in failing(of_family, partial(end_to_end, is_reversed=True), samples)[1]


# -- well-known collators ---------------------------------------------------------------------------------------------

INSTALLED = [case for case in benchmark.CASES if benchmark.version_of(case.library)]


@pytest.mark.parametrize("case", INSTALLED, ids=str)
def test_table_of_collators_is_what_the_referee_says(case, tmp_path):
    """REF-9: of what is installed here; the table is of other versions, too."""
    attention.register()
    row = benchmark.table([benchmark.judged(case, tmp_path)]).splitlines()[-1]
    assert row in (benchmark.ROOT / "docs" / "referee.md").read_text().splitlines()


def test_table_of_collators_has_every_case():
    """REF-9"""
    lines = (benchmark.ROOT / "docs" / "referee.md").read_text().splitlines()
    for case in benchmark.CASES:
        assert [line for line in lines if line.startswith(f"| {case} | {case.family} | {case.attention} |")], case


# -- batches of other shapes ------------------------------------------------------------------------------------------


def without_a_2_d_mask(samples, model):
    """Padded on the left, with a 4-D mask that hides the padding, and positions that begin after it."""
    batch = c.padded(samples, model, on_the_left=True)
    is_token = batch.pop("attention_mask").bool()
    width = is_token.shape[1]
    allowed = torch.ones(width, width).tril().bool() & is_token[:, None] | torch.eye(width).bool()
    positions = (is_token.cumsum(-1) - 1).clamp(min=0)
    return {**batch, "attention_mask": allowed[:, None], "position_ids": positions}


def test_rows_that_are_padded_on_the_left_need_no_2_d_mask(model):
    """REF-2"""
    of_family = model(c.TEXT)
    samples = c.samples_of(of_family)
    assert_isolated(of_family, partial(without_a_2_d_mask, model=of_family), samples)


def tree(samples, *, is_leaking=False):
    """Samples that share their first six tokens have these once; a 4-D mask keeps branches apart."""
    first, fields, own = {}, {"input_ids": [], "labels": [], "position_ids": []}, []
    for number, sample in enumerate(samples):
        tokens, labels = sample["input_ids"], [c.IGNORED, *sample["labels"][1:]]
        start = first.setdefault(tuple(tokens[:6]), len(own))
        shared = 6 if start < len(own) else 0
        positions = list(range(len(tokens)))
        for name, values in zip(fields, (tokens, labels, positions), strict=True):
            fields[name] += values[shared:]
        own += [(number, start, shared)] * (len(tokens) - shared)
    allowed = torch.zeros(len(own), len(own), dtype=torch.bool)
    for at, (number, start, shared) in enumerate(own):
        siblings = {number, number - 1} if is_leaking and shared else {number}
        allowed[at, [other for other in range(at + 1) if own[other][0] in siblings]] = True
        allowed[at, start : start + shared] = True
    return {name: torch.tensor([values]) for name, values in fields.items()} | {"attention_mask": allowed[None, None]}


def test_tree_of_prefixes_is_verified(model):
    """REF-2: and a branch that sees the one before it is stopped."""
    prefix, samples = c.words(6, 99), [c.text_sample(15, 3)]
    for number, length in enumerate((9, 7, 12)):
        own = c.words(length, 200 + number)
        labels = [c.IGNORED] * (6 + length // 2) + own[length // 2 :]
        samples.append({"input_ids": prefix + own, "labels": labels})
    of_family = model(c.TEXT)
    assert "branches of" in assert_isolated(of_family, tree, samples)
    assert "see each other" in failing(of_family, partial(tree, is_leaking=True), samples)[0]


def test_words_in_a_batch_are_left_out(model):
    """REF-8"""
    of_family = model(c.TEXT)
    flat = c.Flat(of_family)
    assert_isolated(
        of_family, lambda some: {**flat(some), "texts": ["a"] * len(some), "name": "x"}, c.samples_of(of_family)
    )


def test_module_without_a_config_is_refused():
    """REF-8"""
    with pytest.raises(DataError, match="Linear has no config; give verify a model of transformers"):
        verify(torch.nn.Linear(2, 2), dict, [])
