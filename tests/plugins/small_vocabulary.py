"""What `--external_plugins` loads to train a model of `small_folder` in a process of its own, wherever that runs."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from tests.tiny import use_ids_of_tokenizer

use_ids_of_tokenizer()
