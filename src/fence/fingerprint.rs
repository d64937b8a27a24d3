//! The digest of a request, by which a reused idempotency key is told from a repeated one.

use std::fmt::Write;

use serde::Serialize;
use serde_json::{Number, Value};
use sha2::{Digest, Sha256};

use super::error::FenceError;

/// The version of the canonical form, the first byte of every fingerprint.
///
/// Form 1 is the JSON of the value without blanks, the members of every object sorted by the
/// Unicode code points of their names, integers in full (amounts of money above 2^53 stay apart),
/// other numbers in the shortest form that reads back as the same double, strings as `serde_json`
/// writes them. Its SHA-256 is the rest of the fingerprint.
const FORM: u8 = 1;

/// Takes the fingerprint of a value.
pub(super) fn fingerprint(value: &impl Serialize) -> Result<Vec<u8>, FenceError> {
    let value = serde_json::to_value(value).map_err(FenceError::Payload)?;
    let mut text = String::new();
    write_canonical(&value, &mut text);
    let mut fingerprint = vec![FORM];
    fingerprint.extend(Sha256::digest(text.as_bytes()));
    Ok(fingerprint)
}

fn write_canonical(value: &Value, out: &mut String) {
    match value {
        Value::Object(members) => {
            // Another crate may have switched on `preserve_order`: the order is ours to make.
            let mut members: Vec<_> = members.iter().collect();
            members.sort_unstable_by_key(|(name, _)| *name);
            write_joined('{', '}', members, out, |(name, value), out| {
                write_scalar(&Value::from(name.as_str()), out);
                out.push(':');
                write_canonical(value, out);
            });
        }
        Value::Array(items) => write_joined('[', ']', items, out, write_canonical),
        scalar => write_scalar(scalar, out),
    }
}

fn write_scalar(scalar: &Value, out: &mut String) {
    // Another crate may have switched on `arbitrary_precision`, which keeps a number's own text.
    let double = scalar.as_f64().filter(|_| scalar.is_f64()).and_then(Number::from_f64).map(Value::from);
    let scalar = double.as_ref().unwrap_or(scalar);
    // Writing to a String cannot fail.
    let _ = write!(out, "{scalar}");
}

fn write_joined<T>(
    open: char,
    close: char,
    items: impl IntoIterator<Item = T>,
    out: &mut String,
    mut write: impl FnMut(T, &mut String),
) {
    out.push(open);
    for (index, item) in items.into_iter().enumerate() {
        if index > 0 {
            out.push(',');
        }
        write(item, out);
    }
    out.push(close);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn same(a: Value, b: Value) -> bool {
        fingerprint(&a).unwrap() == fingerprint(&b).unwrap()
    }

    #[test]
    fn order_of_members_does_not_count() {
        let forward: Value = serde_json::from_str(r#"{"a":1,"b":{"c":2,"d":[1,2]}}"#).unwrap();
        let backward: Value = serde_json::from_str(r#"{ "b": {"d":[1,2],"c":2}, "a":1 }"#).unwrap();
        assert!(same(forward, backward));
        assert!(!same(json!([1, 2]), json!([2, 1])));
    }

    #[test]
    fn large_amounts_stay_apart() {
        assert!(!same(json!(9_007_199_254_740_993_u64), json!(9_007_199_254_740_992_u64)));
        assert!(!same(json!(u64::MAX), json!(u64::MAX - 1)));
    }

    #[test]
    fn structure_cannot_be_forged_by_text() {
        assert!(!same(json!({"a": "1\",\"b\":\"2"}), json!({"a": "1", "b": "2"})));
        assert!(!same(json!("1"), json!(1)));
        assert!(!same(json!(null), json!("null")));
        assert!(!same(json!([]), json!({})));
    }

    #[test]
    fn the_form_is_pinned() {
        let mut text = String::new();
        write_canonical(&json!({"b": [1, 2.5, "ü\n"], "a": null}), &mut text);
        assert_eq!(text, r#"{"a":null,"b":[1,2.5,"ü\n"]}"#);
        let digest = fingerprint(&json!({"amount": 100})).unwrap();
        assert_eq!((digest[0], digest.len()), (1, 33));
        let hex: String = digest[1..5].iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "4d4bbe59");
    }
}
