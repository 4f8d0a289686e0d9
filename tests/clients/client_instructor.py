"""Instructor: objects instead of texts, in each of its modes."""

import enum
from typing import Annotated

import instructor
import openai
import pydantic
import pytest
from conftest import MODEL


class Sea(enum.Enum):
    CALM = "calm"
    ROUGH = "rough"


class Report(pydantic.BaseModel):
    """What the watch has seen."""

    model_config = pydantic.ConfigDict(extra="forbid")  # a small model would never stop adding fields of its own

    sea: Sea
    ships: list[Annotated[int, pydantic.Field(ge=0, le=99)]] = pydantic.Field(max_length=3)
    note: str | None = pydantic.Field(max_length=30)


# Mode.JSON requests any object, and hopes for the fields: that is up to the model.
@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_modes(url, mode):
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=instructor.Mode[mode])
    report = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Report."}],
        response_model=Report,
        max_tokens=500,
        max_retries=0,
        seed=5,
    )
    assert isinstance(report, Report)
