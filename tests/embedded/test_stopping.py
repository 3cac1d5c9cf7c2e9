from leyden.trainer.embedded.stopping import StopStrings


def feed(stops, tokenizer, text):
    """How many bytes are needed until a stop is found, and which."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    stop_strings = StopStrings(stops, tokenizer.decode)
    for n in range(1, len(ids) + 1):
        if (found := stop_strings.find(ids[:n])) is not None:
            return n, found
    return None


def test_found_with_the_token_that_completes_it(tokenizer):
    assert feed(["END"], tokenizer, "the ENDing") == (7, "END")
    assert feed(["END"], tokenizer, "the EN ding") is None


def test_first_in_the_text_wins(tokenizer):
    assert feed(["bc", "abcd", "b"], tokenizer, "xabcd") == (3, "b")
    assert feed(["c", "bc"], tokenizer, "abc") == (3, "bc")


def test_multi_byte_characters(tokenizer):
    """Every byte is a token of its own here: nothing is found before the last byte of the character."""
    assert feed(["é"], tokenizer, "caféx") == (5, "é")
    assert feed(["🙂"], tokenizer, "ok 🙂!") == (7, "🙂")
    assert feed(["k 🙂"], tokenizer, "日本 ok 🙂!") == (len("日本 ok 🙂".encode()), "k 🙂")


def test_stop_before_an_incomplete_character(tokenizer):
    assert feed(["x"], tokenizer, "éxé") == (3, "x")


def test_window_covers_the_longest_stop(tokenizer):
    stop = "🙂" * 10
    assert feed([stop], tokenizer, "é" * 50 + stop + "tail") == (100 + 40, stop)
