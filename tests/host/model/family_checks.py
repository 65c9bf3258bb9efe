"""What is tried on every family: lengths, gradients, evaluation, the proof, sabotages of it, a whole run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from swift_vlpack import prepare_model
from swift_vlpack.attention import attention
from swift_vlpack.errors import IsolationError
from swift_vlpack.feed.collate import Collator
from swift_vlpack.host.headers import pixel_free
from swift_vlpack.proof.perturb import media_of, with_other_media
from swift_vlpack.proof.prove import run_proof
from swift_vlpack.proof.runner import Collated, Runner
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.families import is_packed
from swift_vlpack.rows.samples import Encoded, SampleId
from swift_vlpack.rows.source import RowSource
from tests.data_rows import image_row, sentence, text_row, write_jsonl
from tests.environment import restored_environment
from tests.family_models import Family, load, own_ids
from tests.host import runs
from tests.host.lengths.support import with_lengths
from tests.host.proof.runners import ChangedBatches, template_model
from tests.host.proof.sabotage import boundaries_at, positions_of_the_sequence
from tests.images import GOOD, noise, photo
from tests.sounds import sound

IGNORED = -100
ARGS = SimpleNamespace(dataset_num_proc=1, strict=False)
NOT_OF_THE_MODEL = ("loss_scale", "channel", "text_position_ids", "labels")


class Checked:
    """A family as it trains packed, and again as ms-swift trains it un-packed."""

    def __init__(self, family: Family, folder: Path) -> None:
        self.family = family
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        family.build(folder)
        attention.register()
        with own_ids(folder, family):
            self.model, self.template = load(folder, family, attention.NAME)
            self.plain, self.plain_template = load(folder, family, "eager")
        for name, word in family.ids:
            number = self.template.tokenizer.convert_tokens_to_ids(word)
            setattr(self.template, name, number)
            setattr(self.plain_template, name, number)
        self.is_packed = is_packed(self.template)
        prepare_model(self.model, self.template, any_family=True)
        self.plain_template.set_mode("train")
        self.plain_template.model = self.plain
        self.plain_template.register_post_encode_hook([self.plain])
        self.plain.config.use_cache = self.plain.generation_config.use_cache = False

    @cached_property
    def rows(self) -> dict[str, dict[str, Any]]:
        """Texts, and an image, several, and others of other shapes."""
        made = {}
        if self.family.has_texts:
            made["text"] = text_row("how are you today?", "fine, thanks a lot")
            made["words"] = text_row("tell me more of it", "there is nothing more to tell, so I stop here and now")
            made["again"] = text_row("what is that", "a small house near the street")
        if self.family.has_images:
            folder = self.folder / "images"
            folder.mkdir(exist_ok=True)
            sizes = ((160, 90), (70, 140), (64, 64), (168, 84))
            one, two, three, wide = (photo(folder, str(n), *size, seed=n) for n, size in enumerate(sizes))
            made["image"] = image_row([one], "what is it", "a noisy picture of many colours")
            made["images"] = {
                **text_row("<image>here and <image>there, compare them", "the first is larger"),
                "images": [two, three],
            }
            made["wide"] = image_row([wide], "how wide", "as wide as that")
        if self.family.has_sounds:
            made |= self._rows_with_sounds()
        return made

    def _rows_with_sounds(self) -> dict[str, dict[str, Any]]:
        """A sound, two, a sound beside an image, and a video without one."""
        folder = self.folder / "sounds"
        folder.mkdir(exist_ok=True)
        noises = [sound(folder, str(n), seconds, seed=n) for n, seconds in enumerate((1.2, 1.1, 1.3, 1.05))]
        image = photo(folder, "heard", 80, 60, seed=9)
        frames = [photo(folder, f"frame{n}", 96, 64, seed=10 + n) for n in range(4)]
        return {
            "sound": {**text_row("<audio>what is that", "a noise that swells"), "audios": noises[:1]},
            "sounds": {**text_row("<audio>here and <audio>there", "the first is longer"), "audios": noises[1:3]},
            "seen": {
                **text_row("<image>shows what is in <audio>", "nothing of it"),
                "images": [image],
                "audios": noises[3:],
            },
            "film": {**text_row("<video>what happens", "nothing much"), "videos": [frames]},
        }

    def samples(self) -> list[Encoded]:
        """All rows, encoded."""
        self.template.packing = self.template.padding_free = False
        rows = sorted(self.rows.items())
        made = [
            RowEncoder(self.template).sample(row, SampleId(name, number), strict=True)
            for number, (name, row) in enumerate(rows)
        ]
        without = [
            name for (name, row), sample in zip(rows, made, strict=True) if "images" in row and not media_of(sample)
        ]
        assert not without, (
            f"the template brings no image for the rows {without}: its words for images have to be in the tokenizer "
            "(`_tokenizer`), ids that it names as constants in `ids=`, and names of its tensors in rows/families.py"
        )
        return made

    # -- lengths ------------------------------------------------------------------------------------------------------

    def lengths(self, num_images: int) -> str:
        """Where they come from; raises where one is wrong. Images that no processor reads are left out by both."""
        if not self.family.has_images:
            return "tokens"
        rows = self._odd_rows(num_images)
        expected = [self._length(row) for row in rows]
        self.template.packing = self.template.padding_free = False
        source = RowSource(name="rows", rows=_listed(rows))
        with restored_environment():
            found = with_lengths(source, self.template, ARGS, str(self.folder / f"lengths{num_images}")).sizes
        wrong = [
            (row.get("images") or row["audios"], length, right)
            for row, length, right in zip(rows, found.lengths.tolist(), expected, strict=True)
            if right is not None and length != right
        ]
        assert wrong == []
        assert sum(right is not None for right in expected) > 0.8 * len(rows)
        return "headers" if self._reads_headers(rows[0], expected[0]) else "full encoding"

    def _reads_headers(self, row: dict[str, Any], length: int | None) -> bool:
        try:
            return bool(pixel_free(self.template).encode(row, return_length=True)["length"] == length)
        except Exception:
            return False

    def _length(self, row: dict[str, Any]) -> int | None:
        try:
            return int(self.plain_template.encode(row, return_length=True)["length"])
        except Exception:
            return None

    def _odd_rows(self, num_images: int) -> list[dict[str, Any]]:
        rng = random.Random(3)
        folder = self.folder / f"odd{num_images}"
        folder.mkdir()
        paths = [photo(folder, "first", 100, 80)]
        for name, write in GOOD.items():
            paths.append(str(folder / name))
            write(folder / name)
        modes, ends = ("RGB", "L", "P", "CMYK", "RGBA", "1", "LA"), ("jpg", "png", "webp")
        while len(paths) < num_images:
            mode, end = rng.choice(modes), rng.choice(ends)
            path = folder / f"{len(paths)}.{'png' if mode in ('P', 'RGBA', '1', 'LA') else end}"
            mode = "RGB" if path.suffix == ".webp" else "L" if mode == "CMYK" and path.suffix == ".png" else mode
            noise(rng.randint(1, 240), rng.randint(1, 240), rng.randint(0, 99), mode).save(path)
            paths.append(str(path))
        rows, at = [], 0
        while at < len(paths):
            count = 1 if at == 0 else rng.choice((1, 1, 1, 2))
            rows.append(image_row(paths[at : at + count], sentence(rng, 1, 9), sentence(rng, 1, 9)))
            at += count
        if self.family.has_sounds:
            sounds = folder / "sounds"
            sounds.mkdir()
            for number, seconds in enumerate((0.05, 0.3, 1.0, 1.37, 2.6)):
                audio = sound(sounds, str(number), seconds, rate=16000 if number % 2 else 22050)
                rows.append({**text_row(f"<audio>{sentence(rng, 1, 9)}", sentence(rng, 1, 9)), "audios": [audio]})
        return rows

    # -- packed as alone ----------------------------------------------------------------------------------------------

    def gradient(self) -> float:
        """Most that any weight's gradient of a pack is off from its samples one by one, of the largest there is."""
        samples = self.samples()
        num_targets = sum(sum(label != IGNORED for label in sample["labels"][1:]) for sample in samples)
        alone = self._gradients(self.plain, [self._plain_batch([sample]) for sample in samples], num_targets)
        packed = self._gradients(self.model, [dict(Collator(self.template)([_copies(samples)]))], num_targets)
        assert set(alone) == set(packed)
        largest = max(float(one.abs().max()) for one in alone.values())
        return max(float((alone[name] - packed[name]).abs().max()) for name in alone) / largest

    def evaluation(self) -> float:
        """How far the padded loss is off from what plain ms-swift has for the same batches."""
        self.model.eval()
        self.plain.eval()
        samples, gaps = self.samples(), []
        for batch in (samples, *([sample] for sample in samples)):
            try:
                plain = self._plain_batch(batch)
            except RuntimeError:
                continue  # ms-swift cannot pad pictures of different sizes for this family
            with torch.no_grad():
                losses = [
                    float(_loss(model, inputs, 1))
                    for model, inputs in (
                        (self.plain, plain),
                        (self.model, dict(Collator(self.template)(_copies(batch)))),
                    )
                ]
            gaps.append(abs(losses[0] - losses[1]) / losses[0])
        assert len(gaps) >= len(samples)
        return max(gaps)

    def _plain_batch(self, samples: Sequence[Encoded]) -> dict[str, Any]:
        made: dict[str, Any] = self.plain_template.data_collator(_copies(samples))
        return made

    @staticmethod
    def _gradients(model: Any, batches: list[dict[str, Any]], num_targets: int) -> dict[str, torch.Tensor]:
        model.eval()
        model.zero_grad()
        for batch in batches:
            _loss(model, batch, num_targets).backward()
        return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}

    # -- the proof ----------------------------------------------------------------------------------------------------

    def proof(self) -> str:
        """What the proof says."""
        samples = self.samples()
        try:
            proof = run_proof(self._subject(), samples, [samples[::-1]])
        except IsolationError as error:
            return str(error)
        assert proof.moved == 0
        return "verified"

    def sabotages(self) -> dict[str, bool]:
        """Whether the proof stopped each."""
        right, samples = self._subject(), self.samples()
        # Another image of the same size, so that the two can be exchanged.
        samples += [{**with_other_media(one)} for one in samples if media_of(one)][:2]
        lost = boundaries_at(lambda ends: [*ends[:1], *ends[2:]])
        changed: dict[str, Any] = {
            "a boundary lost": ChangedBatches(right.batches, lost),
            "positions of the row": ChangedBatches(right.batches, _positions_of_the_row),
        }
        if self.family.has_images:
            changed["images exchanged"] = ExchangedMedia(right.batches, "pixel_values")
        if self.family.has_sounds:
            changed["sounds exchanged"] = ExchangedMedia(right.batches, "input_features")
        return {name: _is_stopped(right, rows, samples) for name, rows in changed.items()}

    def _subject(self) -> Runner:
        return template_model(SimpleNamespace(model=self.model, template=self.template))

    # -- a run --------------------------------------------------------------------------------------------------------

    def run(self, monkeypatch_env: Callable[[str, str], None]) -> list[float]:
        """Losses of two packed steps of `swift sft`."""
        data = write_jsonl(self.folder / "rows.jsonl", [row for _ in range(2) for row in self.rows.values()])
        monkeypatch_env("VLPACK_PACKING_ANY_FAMILY", "true")
        options = {"template": self.family.template, "packing_length": 1024, "max_steps": 2, "max_length": 1024}
        options["torch_dtype"] = self.family.run_dtype
        with own_ids(self.folder, self.family):
            done = runs.train(
                runs.packed_argv(
                    self.folder,
                    self.family.model_type,
                    self.folder / "run",
                    dataset=data,
                    split_dataset_ratio=0,
                    **options,
                )
            )
        return [line["loss"] for line in done["log_history"] if "loss" in line]


class ExchangedMedia:
    """Packed sequences in which two samples have each other's pictures or sounds; the shapes are right."""

    def __init__(self, batches: Any, kind: str) -> None:
        self.batches = batches
        self.kind = kind

    @contextmanager
    def batch(self, samples: Sequence[Encoded], *, packed: bool) -> Iterator[Collated]:
        made = list(samples)
        pairs = [
            (a, b)
            for a in range(len(made))
            for b in range(a)
            if self.kind in media_of(made[a]) and _shapes(made[a]) == _shapes(made[b])
        ]
        if packed and pairs:
            a, b = pairs[0]
            made[a], made[b] = {**made[a], **media_of(made[b])}, {**made[b], **media_of(made[a])}
        with self.batches.batch(made, packed=packed) as row:
            yield row


def _positions_of_the_row(row: Collated, samples: Sequence[Encoded]) -> Collated:
    """Positions that go on over the samples; rotary attention does not see a common shift, so they grow faster, too."""
    made = positions_of_the_sequence(row, samples)
    return replace(made, inputs={**made.inputs, "position_ids": 2 * made.inputs["position_ids"]})


def _is_stopped(right: Runner, rows: Any, samples: list[Encoded]) -> bool:
    try:
        run_proof(Runner(right.model, rows, right.is_ordinary), samples)
    except IsolationError:
        return True
    return False


def _shapes(sample: Encoded) -> dict[str, Any]:
    return {name: getattr(value, "shape", None) for name, value in media_of(sample).items()}


def _copies(samples: Sequence[Encoded]) -> list[Encoded]:
    return [dict(sample) for sample in samples]


def _listed(rows: list[dict[str, Any]]) -> Any:
    from datasets import Dataset

    columns = {name: None for row in rows for name in row}  # Dataset takes those of the first row
    return Dataset.from_list([{**columns, **row} for row in rows])


def _loss(model: Any, batch: dict[str, Any], num_targets: int) -> torch.Tensor:
    inputs = {name: value for name, value in batch.items() if name not in NOT_OF_THE_MODEL}
    logits = model(**inputs).logits
    targets = batch["labels"][:, 1:]
    kept = targets != IGNORED
    losses = torch.nn.functional.cross_entropy(logits[:, :-1][kept].float(), targets[kept], reduction="sum")
    return losses / num_targets
