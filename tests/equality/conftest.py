from __future__ import annotations

import pytest

from support.plain_course import OBJECTIVES, Course, config_of, plain_torch
from support.small_run import write_text


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Course]:
    """What one plain torch process does, by objective."""
    folder = tmp_path_factory.mktemp("plain")
    write_text(folder)
    return {objective: plain_torch(config_of(folder, objective)) for objective in OBJECTIVES}
