from model.inputs.words import detail, report_lines


def test_a_reports_line_has_its_details_only_where_they_are_asked_for():
    line = f"  compiled 7 programs in 2.4 s{detail(' (0 came from the disk)')}; 3 more{detail(', later')}"
    assert report_lines(line) == "  compiled 7 programs in 2.4 s; 3 more"
    assert report_lines(line, verbose=True) == "  compiled 7 programs in 2.4 s (0 came from the disk); 3 more, later"


def test_a_long_line_of_a_report_is_broken_between_words():
    words = [f"word-{number}" for number in range(50)]
    lines = report_lines(f"  allocate    0.1 s  {' '.join(words)} /{'a' * 150}").splitlines()
    assert [len(line) <= 120 for line in lines] == [True] * (len(lines) - 1) + [False]  # a path is left whole
    assert lines[0].startswith("  allocate    0.1 s  word-0 ") and lines[1].startswith(" " * 20 + "word-")
    assert " ".join(lines).split()[3:-1] == words
