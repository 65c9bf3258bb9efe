"""What `--external_plugins` loads. Alone in its folder, because ms-swift puts that folder first on `sys.path`."""

from swift_vlpack.host.install import install

install()
