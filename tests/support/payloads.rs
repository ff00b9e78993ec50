//! Texts that try to become markup: 300, from 30 bases in 10 wraps. The tests of the reports include this file too.

const BASES: [&str; 30] = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)>",
    "<iframe src=//x>",
    "\" onmouseover=alert(1) x=\"",
    "' onfocus=alert(1) autofocus='",
    "</title><script>1</script>",
    "</style><body onload=1>",
    "</textarea><b>",
    "</td></tr></table><form>",
    "<a href=javascript:alert(1)>",
    "<!--",
    "--><b>",
    "<![CDATA[<b>",
    "]]><b>",
    "<?xml?>",
    "<math><mi//xlink:href=\"data:x\">",
    "<object data=x>",
    "<base href=//x>",
    "<meta http-equiv=refresh content=0>",
    "<link rel=stylesheet href=//x>",
    "<details open ontoggle=1>",
    "<input autofocus>",
    "{{7*7}}",
    "{% raw %}",
    "${7*7}",
    "&lt;script&gt;",
    "&#60;b&#62;",
    "\u{202e}<b>",
    "\u{1b}]0;<b>\u{7}",
];

const WRAPS: [fn(&str) -> String; 10] = [
    |text| text.to_owned(),
    |text| text.to_uppercase(),
    |text| format!("plain {text} plain"),
    |text| format!("\"{text}\""),
    |text| format!("'>{text}"),
    |text| format!("\">{text}"),
    |text| format!("--> {text}"),
    |text| format!("</del></ins></pre></details>{text}"),
    |text| text.replace(' ', "/"),
    |text| text.repeat(3),
];

/// The texts. None holds a NUL, which the interface refuses.
pub fn payloads() -> Vec<String> {
    BASES.iter().flat_map(|base| WRAPS.iter().map(move |wrap| wrap(base))).collect()
}
