"""The module that the fork server of tests imports first: no garbage is looked for among the objects of those that
follow, which stay. `tests.warmed`, the last of them, enables collection again."""

import gc

gc.disable()
