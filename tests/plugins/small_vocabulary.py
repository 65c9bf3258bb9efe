"""What `--external_plugins` loads in processes that train the models of the fixture `small_folder`."""

from tests.tiny import use_ids_of_tokenizer

use_ids_of_tokenizer()
