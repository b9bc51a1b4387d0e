"""The user's home folder, also for users that the system does not know."""

from pathlib import Path


def home_folder() -> Path:
    """The home folder. For a user without HOME whom the system does not know, as a container may
    have, it is the root folder: that is the HOME which Docker gives such a user."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")
