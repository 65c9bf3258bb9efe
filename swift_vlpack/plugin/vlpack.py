"""Install the plugin: `--external_plugins` loads this file, and puts its folder first on `sys.path`.

So no other module may be in this folder.
"""

import gc

gc.disable()  # imports can start a full collection, which is cheap only after `install` (host/garbage.py)
try:
    from swift_vlpack.host.install import install

    install()
finally:
    gc.enable()
