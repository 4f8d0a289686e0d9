"""What /metrics shows: sums over processes, and the names that our dashboard and others' rely on."""

import json
import pathlib
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

import jaxserve.server
from jaxserve.engine.client import EngineStats
from jaxserve.metrics import HISTOGRAMS, Metrics, SequenceTimer

DASHBOARD = pathlib.Path(jaxserve.server.__file__).parent / "grafana.json"
# The names that vLLM's dashboards know, under our prefix, and our own.
NAMES = """
    num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total prefix_cache_hits_total
    num_preemptions_total prompt_tokens_total generation_tokens_total request_success_total
    time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket e2e_request_latency_seconds_bucket
    request_queue_time_seconds_bucket request_prefill_time_seconds_bucket request_decode_time_seconds_bucket
    iteration_tokens_total_bucket compiles_total recompiles_after_warmup_total step_time_seconds_bucket
    hbm_bandwidth_utilization_ratio corrupted_requests_total
    request_prompt_tokens_bucket request_generation_tokens_bucket request_params_max_tokens_bucket
    request_params_n_bucket request_inference_time_seconds_bucket request_num_preemptions_bucket
    num_requests_waiting_by_reason kv_cache_free_blocks kv_cache_cached_blocks
"""
# Names without a panel of the dashboard.
OTHER_NAMES = """
    cache_config_info request_max_num_generation_tokens_bucket request_time_per_output_token_seconds_bucket
    unknown_request_fields_total prompt_tokens_cached_total request_prefill_kv_computed_tokens_bucket
    admission_rejections_total
"""
CACHE_CONFIG = {"block_size": "16", "num_gpu_blocks": "99"}


def samples(metrics):
    """Name and labels -> value, from the text that is served."""
    return {
        (sample.name.removeprefix("jaxserve:"), *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def value(metrics, name, **labels):
    return samples(metrics)[name, *sorted({"model_name": "m", **labels}.items())]


def idle():
    return {"0": EngineStats()}


@pytest.fixture
def metrics():
    return Metrics(model="m", stats=idle, cache_config=CACHE_CONFIG)


def test_every_name_that_is_promised(metrics):
    assert {*NAMES.split(), *OTHER_NAMES.split()} <= {name for name, *_ in samples(metrics)}


def test_the_names_of_vllm():
    ours = Metrics(model="m", stats=idle, cache_config=CACHE_CONFIG).render().decode()
    theirs = Metrics(model="m", stats=idle, cache_config=CACHE_CONFIG, names="vllm").render().decode()
    assert theirs.replace("vllm:", "jaxserve:").replace('engine="0",', "") == ours
    assert 'vllm:num_requests_waiting{engine="0",model_name="m"} 0.0' in theirs
    assert 'vllm:cache_config_info{block_size="16",engine="0",model_name="m",num_gpu_blocks="99"} 1.0' in theirs


@pytest.mark.parametrize("names", ["jaxserve", "vllm"])
def test_each_of_several_engines_has_its_own(names):
    """Prometheus takes each name once. A text without the label of one engine is what scrapers had until now."""
    stats = {"0": EngineStats(num_running=3), "1": EngineStats(num_running=4, num_compiles=5)}
    text = Metrics(model="m", stats=lambda: stats, cache_config=CACHE_CONFIG, names=names).render().decode()
    for line in (
        f'{names}:num_requests_running{{engine="0",model_name="m"}} 3.0',
        f'{names}:num_requests_running{{engine="1",model_name="m"}} 4.0',
        f'{names}:compiles_total{{engine="1",model_name="m"}} 5.0',
        f'{names}:cache_config_info{{block_size="16",engine="1",model_name="m",num_gpu_blocks="99"}} 1.0',
        f'{names}:iteration_tokens_total_count{{engine="1",model_name="m"}} 0.0',
        f'{names}:num_requests_waiting_by_reason{{engine="1",model_name="m",reason="capacity"}} 0.0',
    ):
        assert text.count(f"\n{line}\n") == 1
    types = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    assert ('prompt_tokens_total{engine="0"' in text) == (names == "vllm")  # counted by the server, for all engines


def test_what_an_endpoint_picker_reads_is_there():
    """Gauges and labels of the model server protocol of Gateway API's inference extension, by vLLM's names."""
    text = Metrics(model="m", stats=idle, cache_config=CACHE_CONFIG, names="vllm").render().decode()
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info"):
        assert f"# TYPE vllm:{name} gauge\n" in text
    [cache] = re.findall(r"^vllm:cache_config_info{(.*)} 1.0$", text, flags=re.MULTILINE)
    assert {"block_size", "num_gpu_blocks"} <= set(re.findall(r'(\w+)="', cache))


def test_http_requests_are_counted_by_route():
    routes = [("GET", "/health"), ("POST", "/v1/completions")]
    metrics = Metrics(model="m", stats=idle, cache_config={}, names="vllm", routes=routes)
    for path, status, seconds in (("/v1/completions", 200, 0.3), ("/v1/completions", 429, 2.0), ("/nowhere", 404, 0.0)):
        metrics.answered("POST", path, status=status, seconds=seconds)
    text = metrics.render().decode()
    for line in (
        'http_requests_total{handler="/v1/completions",method="POST",model_name="m",status="2xx"} 1.0',
        'http_requests_total{handler="/v1/completions",method="POST",model_name="m",status="4xx"} 1.0',
        'http_requests_total{handler="none",method="OTHER",model_name="m",status="4xx"} 1.0',
        'http_request_duration_seconds_bucket{handler="/v1/completions",le="0.5",method="POST",model_name="m"} 1.0',
        'http_request_duration_seconds_count{handler="/v1/completions",method="POST",model_name="m"} 2.0',
        'vllm:admission_rejections_total{engine="0",model_name="m",reason="max_num_queued_reqs"} 0.0',
        'vllm:request_num_preemptions_count{engine="0",model_name="m"} 0.0',
        'vllm:iteration_tokens_total_count{engine="0",model_name="m"} 0.0',
    ):
        assert f"\n{line}\n" in text
    assert "/health" not in text


def test_what_requests_wait_for():
    stats = EngineStats(num_waiting=6, num_waiting_new=1, num_waiting_preempted=2, num_waiting_deferred=3)
    metrics = Metrics(model="m", stats=lambda: {"0": stats}, cache_config=CACHE_CONFIG)
    reasons = {"capacity": 1, "preempted": 2, "deferred": 3}
    for reason, count in reasons.items():
        assert value(metrics, "num_requests_waiting_by_reason", reason=reason) == count


def test_drafts_are_counted_under_vllms_names_where_there_are_any():
    stats = EngineStats(
        spec_decode_num_drafts=7,
        spec_decode_num_draft_tokens=20,
        spec_decode_num_accepted_tokens=9,
        spec_decode_num_accepted_tokens_per_pos=(6, 3),
    )
    metrics = Metrics(model="m", stats=lambda: {"0": stats}, cache_config=CACHE_CONFIG)
    counts = {"drafts": 7, "draft_tokens": 20, "accepted_tokens": 9}
    for name, count in counts.items():
        assert value(metrics, f"spec_decode_num_{name}_total") == count
    for position, count in enumerate((6, 3)):
        assert value(metrics, "spec_decode_num_accepted_tokens_per_pos_total", position=str(position)) == count
    metrics = Metrics(model="m", stats=idle, cache_config=CACHE_CONFIG)
    assert not any(name.startswith("spec_decode") for name, *_ in samples(metrics))


def test_the_dashboard_asks_for_what_there_is(metrics):
    names = {name for name, *_ in samples(metrics)}
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    asked = {name for query in queries for name in re.findall(r"jaxserve:(\w+)", query)}
    assert asked <= names
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in asked} >= {
        re.sub("_(bucket|sum|count)$", "", name) for name in NAMES.split()
    }
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(set(places)) == len(places)


def test_histograms_count_as_prometheus_does(metrics):
    for seconds in (0.004, 0.005, 0.0051, 1000.0):
        metrics.observe("e2e_request_latency_seconds", seconds)
    counts = {
        le: value(metrics, "e2e_request_latency_seconds_bucket", le=le) for le in ("0.005", "0.01", "600.0", "+Inf")
    }
    assert counts == {"0.005": 2, "0.01": 3, "600.0": 3, "+Inf": 4}  # a bound belongs to its bucket
    assert value(metrics, "e2e_request_latency_seconds_count") == 4
    assert value(metrics, "e2e_request_latency_seconds_sum") == pytest.approx(1000.0141)


def test_every_histogram_has_cells_of_its_own(metrics):
    for number, name in enumerate(HISTOGRAMS, 1):
        metrics.observe(name, 1e6, number)
    assert [value(metrics, f"{name}_count") for name in HISTOGRAMS] == list(range(1, len(HISTOGRAMS) + 1))
    assert value(metrics, "generation_tokens_total") == value(metrics, "prompt_tokens_total") == 0


TIMES = ["time_to_first_token", "inter_token_latency", "request_decode_time", "e2e_request_latency"]


def test_a_sequence_from_arrival_to_end(metrics):
    timer = SequenceTimer(metrics, arrival=0.0)
    timer.tokens(1, now=2.0)
    timer.tokens(3, now=5.0)
    timer.finish("length", now=5.5)
    assert value(metrics, "generation_tokens_total") == 4
    assert value(metrics, "time_to_first_token_seconds_count") == 1
    assert value(metrics, "inter_token_latency_seconds_count") == 3
    assert value(metrics, "inter_token_latency_seconds_bucket", le="1.0") == 3, "one each second"
    assert value(metrics, "request_generation_tokens_sum") == 4
    assert value(metrics, "request_time_per_output_token_seconds_sum") == 1.0
    sums = [value(metrics, f"{name}_seconds_sum") for name in TIMES]
    assert sums == [2.0, 3.0, 3.0, 5.5]
    assert value(metrics, "request_success_total", finished_reason="length") == 1
    assert value(metrics, "request_success_total", finished_reason="stop") == 0


@pytest.mark.parametrize("deliveries", [[1] * 91, [91], [5, 1, 60, 25], [90, 1]])
def test_one_interval_between_any_two_tokens(metrics, deliveries):
    timer = SequenceTimer(metrics, arrival=0.0)
    timer.start = 0.25
    for number, count in enumerate(deliveries):
        timer.tokens(count, now=0.5 + number)
    timer.finish("stop", now=1000.0)
    assert value(metrics, "inter_token_latency_seconds_count") == 90
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(len(deliveries) - 1)
    assert value(metrics, "request_inference_time_seconds_sum") == len(deliveries) - 0.75


def test_processes_show_their_sums_and_keep_what_a_dead_one_counted(tmp_path):
    one, other = (Metrics(model="m", stats=idle, cache_config={}, file=tmp_path / f"metrics-{i}") for i in range(2))
    one.count("prompt_tokens_total", 5)
    one.count("stop")
    other.count("prompt_tokens_total", 7)
    other.observe("e2e_request_latency_seconds", 0.1)
    for shows in (one, other):
        assert value(shows, "prompt_tokens_total") == 12
        assert value(shows, "request_success_total", finished_reason="stop") == 1
        assert value(shows, "e2e_request_latency_seconds_count") == 1
    (tmp_path / "metrics-2").touch()  # a process that has just started
    assert value(one, "prompt_tokens_total") == 12
    del other  # its process is killed, and another one replaces it
    successor = Metrics(model="m", stats=idle, cache_config={}, file=tmp_path / "metrics-1")
    successor.count("prompt_tokens_total")
    assert value(one, "prompt_tokens_total") == 13
