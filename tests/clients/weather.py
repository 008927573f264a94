"""The question that the tests of tools ask, and the right answer: for every client the same."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

QUESTION = "What is the weather in Oslo and in Cairo?"
FOUND = {"Oslo": "snowy, 3 degrees", "Cairo": "sunny, 33 degrees"}
ANSWER = "It is snowy, 3 degrees in Oslo and sunny, 33 degrees in Cairo."
NEWS = "Lima: foggy, 17 degrees."


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    sky: Literal["sunny", "rainy", "cloudy", "windy", "snowy", "foggy"]
    degrees: int


class Verdict(BaseModel):
    """Whether all is well."""

    model_config = ConfigDict(extra="forbid")
    ok: bool
    mood: Literal["glad", "sad"]


class Report(BaseModel):
    """The weather of some days."""

    model_config = ConfigDict(extra="forbid")
    weather: Weather
    days: list[Literal["Monday", "Tuesday", "Sunday"]] = Field(min_length=1, max_length=2)
    ok: bool


NEWS_WEATHER = Weather(city="Lima", sky="foggy", degrees=17)


def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: its name
    """
    return FOUND[city]
