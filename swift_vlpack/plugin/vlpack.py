"""What `--external_plugins` loads. Alone in its folder, because ms-swift puts that folder first on `sys.path`."""

import gc

gc.disable()  # because imports can set off a full collection, before `install` has made these cheap
try:
    from swift_vlpack.host.install import install

    install()
finally:
    gc.enable()
