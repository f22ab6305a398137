"""Checkpoints: saved by owners through torch.distributed.checkpoint, keyed by name, loadable at any number of ranks.

Begin with ``saving.py`` and ``loading.py``; ``manifest.py`` has the [Note: Format of a checkpoint], ``storage.py`` the
[Note: Two halves of a save].
"""
