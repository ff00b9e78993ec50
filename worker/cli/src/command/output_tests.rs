use super::*;
use serde_json::{Value, json};
use wakeful_engine::printable::is_active_char;

/// Text that a mail or a model could send. It clears the screen, sets the title, forges a line and reverses
/// the text direction.
const HOSTILE: &str =
    "a\u{1b}[2J\u{1b}]0;title\u{7}\nsess_1\tcompleted\r\u{9b}31m\u{202e}gnp.exe\u{2066}\u{200b}\u{7f}";

fn plain(width: Option<u16>, colour: bool) -> Output {
    Output { format: None, terminal: width.is_some(), colour, width }
}

#[test]
fn hostile_text_is_one_line_of_characters_that_do_nothing() {
    let shown = printable(HOSTILE);
    assert!(!shown.contains(is_active_char), "{shown:?}");
    assert_eq!(
        shown,
        "a\\u{1b}[2J\\u{1b}]0;title\\u{7}\\nsess_1\\tcompleted\\r\\u{9b}31m\\u{202e}gnp.exe\\u{2066}\\u{200b}\\u{7f}"
    );
    assert_eq!(printable("Grüße, שלום, 👩‍👧 c:\\new"), "Grüße, שלום, 👩‍👧 c:\\new");
}

#[test]
fn json_reads_back_as_it_was_and_holds_no_character_that_acts() {
    let value = json!({"text": HOSTILE, "tag": "\u{e0041}", "plain": "é"});
    for pretty in [true, false] {
        let text = json(&value, pretty).unwrap();
        assert!(!text.contains(|c| c != '\n' && is_active_char(c)), "{text:?}");
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
    }
}

#[test]
fn a_row_in_a_pipe_is_one_line_whatever_it_holds() {
    let mut table = Table::new(&[Column::fixed("A"), Column::flexible("B")]);
    table.row([HOSTILE.into(), "b".into()]);
    let lines = table.lines();
    assert_eq!(lines.lines().count(), 1);
    assert_eq!(lines.matches('\t').count(), 1);
}

#[test]
fn a_table_keeps_to_the_width_and_cuts_the_flexible_column() {
    let mut table = Table::new(&[Column::fixed("ID"), Column::flexible("NOTE"), Column::number("N")]);
    table.row(["sess_0123456789".into(), "many words ".repeat(20).into(), 7.into()]);
    let text = plain(Some(60), false).aligned(&table, 0);
    assert_eq!(text.lines().count(), 2, "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 60), "{text}");
    assert!(text.contains("sess_0123456789  many words") && text.contains('…'), "{text}");
    assert!(text.lines().all(|line| line == line.trim_end()));
}

#[test]
fn a_narrow_terminal_goes_without_what_is_extra() {
    let mut table =
        Table::new(&[Column::fixed("ID"), Column::number("EXTRA").extra(), Column::flexible("NOTE")]);
    table.row(["a".into(), 5.into(), "b".into()]);
    assert_eq!(plain(Some(99), false).aligned(&table, 0), "ID  NOTE\na   b\n");
    assert_eq!(plain(None, false).aligned(&table, 0), "ID  EXTRA  NOTE\na       5  b\n");
    assert_eq!(table.lines(), "a\t5\tb\n");
}

#[test]
fn a_narrow_terminal_shows_below_a_row_what_is_long() {
    let mut table = Table::new(&[
        Column::fixed("ID"),
        Column::fixed("FROM").below(),
        Column::flexible("WHY").below(),
        Column::number("N"),
    ]);
    table.row(["a".into(), "::1".into(), "many words ".repeat(20).into(), 5.into()]);
    table.row(["b".into(), "-".into(), "".into(), 6.into()]);
    let narrow = plain(Some(40), false).aligned(&table, 0);
    let lines: Vec<&str> = narrow.lines().collect();
    assert_eq!([lines[0], lines[1], lines[3]], ["ID  N", "a   5", "b   6"], "{narrow}");
    assert!(lines[2].starts_with("    from: ::1, why: many words") && lines[2].ends_with('…'), "{narrow}");
    assert!(lines[2].chars().count() <= 40 && lines.len() == 4, "{narrow}");
    assert!(plain(Some(120), false).aligned(&table, 0).starts_with("ID  FROM  WHY"));
    assert_eq!(table.lines().lines().nth(1), Some("b\t-\t\t6"));
}

#[test]
fn a_block_is_wrapped_and_indented_so_that_it_forges_no_heading() {
    let text = plain(Some(40), false).block("one two three four five six seven eight nine\n#2 user", 4);
    assert!(text.lines().all(|line| line.starts_with("    ") && line.chars().count() <= 40), "{text}");
    assert_eq!(text.lines().last(), Some("    #2 user"));
    let piped = plain(None, false).block(&"word ".repeat(100), 4);
    assert_eq!(piped.lines().count(), 1, "a pipe has no width");
}

#[test]
fn colour_is_for_terminals() {
    assert_eq!(plain(None, false).paint(Tone::Bad, "failed"), "failed");
    assert_eq!(plain(Some(80), true).paint(Tone::Bad, "fa\u{1b}iled"), "\u{1b}[31mfa\\u{1b}iled\u{1b}[0m");
    let mut table = Table::new(&[Column::fixed("A")]);
    table.row([Cell::status("failed")]);
    assert!(!plain(None, false).aligned(&table, 0).contains('\u{1b}'));
    assert!(plain(Some(80), true).aligned(&table, 0).contains('\u{1b}'));
}

#[test]
fn spans_and_money_are_short() {
    let spans: Vec<String> =
        [0.25, 0.9999, 59.9, 119.0, 119.9, 7199.0, 200_000.0].into_iter().map(span).collect();
    assert_eq!(spans, ["250ms", "1s", "60s", "119s", "2m", "2h", "2d"]);
    assert_eq!([dollars(0), dollars(1_234_567), dollars(99)], ["$0.0000", "$1.2345", "$0.0000"]);
}

#[test]
fn a_narrow_terminal_shows_the_beginning_of_an_id_and_the_whole_reason() {
    let mut table = Table::new(&[Column::id("SESSION"), Column::fixed("STATUS"), Column::flexible("NOTE")]);
    let id = "sess_01a2077b201b730e9161907942930c33";
    table.row([id.into(), "failed".into(), "the model's provider refused the credentials".into()]);
    let narrow = table.aligned(Some(80), false, 0);
    assert!(
        narrow.contains("sess_01a2077b201b730  ") && narrow.contains("refused the credentials"),
        "{narrow}"
    );
    assert!(table.aligned(Some(120), false, 0).contains(id));
    assert!(table.lines().contains(id), "a pipe gets everything");
}
