//! Names in Avro schemas: which ones every reader takes, and what Java makes of the others.

/// The names that the Avro specification allows; the crate's library takes no others.
pub(in crate::table) fn is_plain(name: &str) -> bool {
    let mut characters = name.chars();
    let first = characters.next();
    first.is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
        && characters.all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// The name as Java writes it (`AvroSchemaUtil.makeCompatibleName`): letters and digits of any script stay, a digit
/// in front gets a `_`, everything else is written as its number. Java counts in UTF-16.
pub(in crate::table) fn compatible(name: &str) -> String {
    let mut made = String::new();
    for (at, unit) in name.encode_utf16().enumerate() {
        // Half of a pair is no letter to Java.
        match char::from_u32(u32::from(unit)) {
            Some(c) if c == '_' || c.is_alphabetic() || (at > 0 && c.is_numeric()) => made.push(c),
            Some(c) if c.is_numeric() => {
                made.push('_');
                made.push(c);
            }
            _ => made.push_str(&format!("_x{unit:X}")),
        }
    }
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_changed_as_java_changes_them() {
        for (name, made) in [
            ("plain_1", "plain_1"),
            ("order day", "order_x20day"),
            ("a-b", "a_x2Db"),
            ("b.c", "b_x2Ec"),
            ("9th", "_9th"),
            ("größe", "größe"),
            ("日付", "日付"),
            ("☃", "_x2603"),
            ("a😀", "a_xD83D_xDE00"),
        ] {
            assert_eq!(compatible(name), made, "{name}");
        }
        for (name, plain) in
            [("plain_1", true), ("_", true), ("größe", false), ("9th", false), ("a b", false), ("", false)]
        {
            assert_eq!(is_plain(name), plain, "{name}");
        }
    }
}
