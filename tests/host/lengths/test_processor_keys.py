"""What a length is remembered under, of the model: edit its files, and it is measured again, and right."""

import json
import shutil

import pytest
import torch
from swift.model import get_model_processor
from swift.template import get_template

from tests.data_rows import image_row, text_row
from tests.family_models import FAMILIES, own_ids
from tests.host.lengths.support import ARGS, context_of, dataset, source, with_lengths
from tests.images import photo
from tests.marks import telling

LLAVA, ONEVISION, INTERN, GEMMA = "LLaVA 1.5 (HF)", "LLaVA-OneVision (HF)", "InternVL (HF)", "Gemma 3"
pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # of ms-swift's InternVL
PROCESSOR, CONFIG = "processor_config.json", "config.json"


class Model:
    """A folder of a tiny model, and copies of it with other settings."""

    def __init__(self, name, folder):
        self.family, self.folder = FAMILIES[name], folder
        folder.mkdir()
        self.family.build(folder)

    def copy(self, to, file=None, path=(), value=None):
        shutil.copytree(self.folder, to)
        if file is not None:
            content = inner = json.loads((to / file).read_text())
            for name in path[:-1]:
                inner = inner[name]
            assert inner.get(path[-1]) != value
            inner[path[-1]] = value
            (to / file).write_text(json.dumps(content))
        return to

    def ids(self):
        return own_ids(self.folder, self.family)

    def template(self, folder, dtype=torch.float32, attn_impl=None, *, load_model=False):
        kind = self.family.model_type
        with self.ids():
            _, processor = get_model_processor(
                str(folder),
                model_type=kind,
                torch_dtype=dtype,
                attn_impl=attn_impl,
                use_hf=True,
                load_model=load_model,
            )
            made = get_template(processor, template_type=self.family.template, max_length=4096)
        made.set_mode("train")
        return made


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root, made = tmp_path_factory.mktemp("models"), {}

    def model(name):
        if name not in made:
            made[name] = Model(name, root / str(len(made)))
        return made[name]

    return model


@pytest.fixture
def rows(tmp_path):
    paths = [photo(tmp_path, str(width), width, height) for width, height in ((320, 240), (120, 300), (90, 90))]
    return dataset([text_row(), *[image_row([path]) for path in paths], image_row(paths[:2])])


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        (LLAVA, (PROCESSOR, ["num_additional_image_tokens"], 3)),
        (LLAVA, (PROCESSOR, ["patch_size"], 7)),
        (LLAVA, (PROCESSOR, ["vision_feature_select_strategy"], "full")),
        (LLAVA, (CONFIG, ["vision_config", "patch_size"], 7)),
        telling(ONEVISION, (PROCESSOR, ["num_image_tokens"], 4)),
        pytest.param(ONEVISION, (PROCESSOR, ["vision_aspect_ratio"], "anyres_max_2"), marks=pytest.mark.slow),
        pytest.param(ONEVISION, (CONFIG, ["vision_config", "patch_size"], 7), marks=pytest.mark.slow),
        (INTERN, (PROCESSOR, ["image_seq_length"], 9)),
        (INTERN, (CONFIG, ["vision_config", "patch_size"], [7, 7])),
        (GEMMA, (PROCESSOR, ["image_seq_length"], 9)),
    ],
    ids=lambda value: ".".join(value[1]) if isinstance(value, tuple) else value,
)
def test_edited_setting_is_measured_again(name, edit, models, rows, tmp_path):
    """LEN-7: of the processor itself, which is in no image processor's settings, and of the model's config."""

    def measured(folder, cache):
        template = model.template(folder)
        with model.ids():
            sizes = with_lengths(source(rows), template, ARGS, str(tmp_path / cache)).sizes
        assert sizes.failures == {}
        return sizes.columns.tolist()

    model = models(name)
    edited = model.copy(tmp_path / "edited", *edit)
    before, after = measured(model.folder, "cache"), measured(edited, "cache")
    assert after == measured(edited, "empty")
    assert after != before, "an edit that changes nothing shows nothing"


@pytest.mark.parametrize("name", [LLAVA, INTERN])
def test_copied_and_saved_again_in_another_precision_it_is_the_same_model(name, models, tmp_path):
    """LEN-7: neither where the folder lies, nor how the model computes is in the key."""
    model = models(name)
    key = context_of(model.template(model.folder))
    assert context_of(model.template(model.copy(tmp_path / "copy"))) == key
    saved = model.copy(tmp_path / "saved", CONFIG, ["dtype"], "bfloat16")
    assert context_of(model.template(saved)) == key
    loaded = model.template(saved, torch.bfloat16, "eager", load_model=True)
    assert context_of(loaded) == key, "as training has it, which loads the weights too"
