"""`use_beam_search` of completions and chats: what it goes with, and how the groups of such a request are run."""

from collections.abc import Sequence

from jaxserve.engine.beam_search import BeamSearch, check_width, run_beams_async
from jaxserve.engine.frontend import Frontend
from jaxserve.engine.output import RequestGroup
from jaxserve.engine.stream import Take
from jaxserve.errors import InvalidRequest
from jaxserve.sampling_params import PARAMETERS, BeamSearchParams, SamplingParams
from jaxserve.server.protocol.chat import ChatRequest
from jaxserve.server.protocol.completions import CompletionRequest


def beam_params(body: CompletionRequest | ChatRequest) -> BeamSearchParams | None:
    """Return how to search, None for a request that does not ask for it. Raises InvalidRequest, naming the field."""
    if not body.use_beam_search:
        for name, neutral in (("length_penalty", 1), ("early_stopping", False)):
            if (value := getattr(body, name)) is not None and value != neutral:
                raise InvalidRequest(f"{name} needs use_beam_search", param=name)
        return None
    if body.constraint_field is not None:
        raise InvalidRequest(f"use_beam_search does not follow {body.constraint_field}", param=body.constraint_field)
    for name, parameter in PARAMETERS.items():
        value = getattr(body, name, None)
        is_set = value is not None and value is not False  # `logprobs` of a chat may be false
        if is_set and parameter.neutral is not None and value not in parameter.neutral:
            raise InvalidRequest(f"use_beam_search does not follow {name}, got {value!r:.100}", param=name)
    try:
        return BeamSearchParams(
            beam_width=1 if body.n is None else body.n,
            max_tokens=None,  # the group says how many
            length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
            early_stopping=False if body.early_stopping is None else body.early_stopping,
        )
    except InvalidRequest as error:
        error.param = "n" if error.param == "beam_width" else error.param
        raise


def for_beams(params: SamplingParams) -> SamplingParams:
    """Return the sampling parameters of a group whose sequences are beams: nothing that a model's defaults ask for."""
    return SamplingParams(
        n=params.n,
        max_tokens=params.max_tokens,
        temperature=0.0,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        seed=0,
    )


def set_beams(frontend: Frontend, group: RequestGroup, beams: BeamSearchParams | None) -> RequestGroup:
    """Let the sequences of a group be beams. Raises InvalidRequest for more than there are log probabilities for."""
    if beams is not None:
        check_width(frontend, group, beams, field="n")
        group.beams = beams
    return group


async def run_groups(frontend: Frontend, groups: Sequence[RequestGroup], take: Take) -> None:
    """Run groups as `Frontend.run` does. What beams find is passed on at once, at the end: earlier it may change."""
    searches = [BeamSearch(frontend, group, group.beams) for group in groups if group.beams is not None]
    if not searches:
        await frontend.run(groups, take)
        return
    assert len(searches) == len(groups)
    await run_beams_async(frontend, searches)
    for index, (group, search) in enumerate(zip(groups, searches, strict=True)):
        group.push(search.outputs())
        if (delta := group.take_delta()) is not None:
            take(index, delta)
