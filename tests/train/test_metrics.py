"""JSON lines and TensorBoard events, and what a resumed run makes of them."""

import struct

from train import metrics
from train.flops import peak_flops, step_flops_per_token
from train.tensorboard import EventWriter, crc32c
from wide_jax.config import ModelConfig, WideConfig


def test_crc32c_has_its_published_check_value():
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, 32 bytes of zeros


def records(file):
    """Payloads of a TFRecord file, with both checksums verified."""

    def masked(data):
        crc = crc32c(data)
        return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF

    data, found = file.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12])[0] == masked(data[:8])
        payload = data[12 : 12 + length]
        assert struct.unpack("<I", data[12 + length : 16 + length])[0] == masked(payload)
        found.append(payload)
        data = data[16 + length :]
    return found


def test_events_are_what_tensorboard_reads(tmp_path):
    writer = EventWriter(tmp_path)
    writer.scalars(300, {"train/lm_loss": 1.5})
    writer.close()
    (file,) = tmp_path.iterdir()
    version, event = records(file)
    assert version[0] == 0x09  # field 1 (wall time), double
    assert version[9:] == b"\x1a\x0dbrain.Event:2"
    # step 300 as a varint; summary > value > tag and simple_value
    value = b"\x0a\x0dtrain/lm_loss" + b"\x15" + struct.pack("<f", 1.5)
    summary = b"\x0a" + bytes([len(value)]) + value
    assert event[9:] == b"\x10\xac\x02" + b"\x2a" + bytes([len(summary)]) + summary


def test_a_resumed_run_drops_the_lines_it_will_repeat(tmp_path):
    log = metrics.MetricsLog(tmp_path)
    for update in range(5):
        log.write("train", update, {"lm_loss": float(update), "skip": {"ffn": 0.5}, "mfu": None})
    log.close()
    with (tmp_path / metrics.FILE).open("a") as stream:
        stream.write('{"kind": "train", "upd')  # killed here
    assert [line["update"] for line in metrics.read(tmp_path)] == list(range(5))
    log = metrics.MetricsLog(tmp_path, resume_at=3)
    log.write("train", 3, {"lm_loss": 30.0})
    log.close()
    lines = metrics.read(tmp_path)
    assert [line["lm_loss"] for line in lines] == [0.0, 1.0, 2.0, 30.0]


def test_needed_flops_of_llama_8b():
    config = ModelConfig(
        "llama", 128_256, 4096, 14_336, 32, 32, 8, 128, 131_072, tie_word_embeddings=False
    )
    wide = WideConfig.for_model(config)
    flops = step_flops_per_token(config, wide, 4_096)
    linear = 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14_336) + 4096 * 128_256
    attention = 32 * 4096 * 4097 / 2
    routers = 32 * 32 * (2 * 4096 + 2 * (8 + 112))
    assert flops == 4 * linear + 12 * attention + 6 * routers
    assert 4 * 7.5e9 < flops < 4 * 8.5e9
    more = step_flops_per_token(config, wide, 4_096, lora_rank=16) - flops
    adapter = 41_943_040  # parameters of PEFT's r=16 on all seven maps
    assert more == 6 * adapter


def test_peaks_are_known_or_not_guessed():
    assert peak_flops("NVIDIA H200", "bfloat16") == 990e12
    assert peak_flops("cpu", "float32") is None
