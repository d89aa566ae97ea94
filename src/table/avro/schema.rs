//! The Avro schema of a file, as far as reading its values needs it (Avro specification 1.12, "Schema
//! Declaration"). Field ids are those of the table spec, attribute `field-id`.

use std::collections::HashMap;

use serde_json::Value;

use super::{Unusual, Usual};

/// Nesting that manifests do not come near.
const MAX_DEPTH: usize = 16;

#[derive(Clone, Debug, PartialEq)]
pub(in crate::table) enum Node {
    Null,
    Boolean,
    Int,
    Long,
    Float,
    Double,
    Bytes,
    String,
    Fixed(usize),
    Array(Box<Node>),
    Map(Box<Node>),
    Union(Vec<Node>),
    Record(Vec<Field>),
}

#[derive(Clone, Debug, PartialEq)]
pub(in crate::table) struct Field {
    /// `None`: the file does not say.
    pub id: Option<i32>,
    pub name: String,
    pub node: Node,
}

impl Node {
    /// Reads a schema. Named types are put in where they are referred to; one that holds itself is unusual.
    pub fn parse(json: &[u8]) -> Usual<Self> {
        let json: Value = serde_json::from_slice(json).map_err(|_| Unusual)?;
        node(&json, &mut HashMap::new(), 0)
    }

    pub fn record(&self) -> Usual<&[Field]> {
        match self {
            Self::Record(fields) => Ok(fields),
            _ => Err(Unusual),
        }
    }
}

fn node(json: &Value, named: &mut HashMap<String, Node>, depth: usize) -> Usual<Node> {
    if depth > MAX_DEPTH {
        return Err(Unusual);
    }
    match json {
        Value::String(name) => primitive(name).or_else(|| named.get(name).cloned()).ok_or(Unusual),
        Value::Array(options) => {
            options.iter().map(|option| node(option, named, depth + 1)).collect::<Usual<_>>().map(Node::Union)
        }
        Value::Object(object) => {
            let inner = |key: &str, named: &mut _| {
                node(object.get(key).ok_or(Unusual)?, named, depth + 1).map(Box::new)
            };
            let typed = object.get("type").ok_or(Unusual)?;
            let Some(kind) = typed.as_str() else { return node(typed, named, depth + 1) };
            let parsed = match kind {
                "record" => {
                    let fields = object.get("fields").and_then(Value::as_array).ok_or(Unusual)?;
                    Node::Record(
                        fields.iter().map(|json| field(json, named, depth + 1)).collect::<Usual<_>>()?,
                    )
                }
                "array" => Node::Array(inner("items", named)?),
                "map" => Node::Map(inner("values", named)?),
                "fixed" => {
                    let size = object.get("size").and_then(Value::as_u64).ok_or(Unusual)?;
                    Node::Fixed(usize::try_from(size).map_err(|_| Unusual)?)
                }
                other => return primitive(other).or_else(|| named.get(other).cloned()).ok_or(Unusual),
            };
            if let (Node::Record(_) | Node::Fixed(_), Some(name)) =
                (&parsed, object.get("name").and_then(Value::as_str))
            {
                named.insert(name.to_owned(), parsed.clone());
            }
            Ok(parsed)
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => Err(Unusual),
    }
}

fn field(json: &Value, named: &mut HashMap<String, Node>, depth: usize) -> Usual<Field> {
    let id = match json.get("field-id") {
        Some(id) => Some(id.as_i64().and_then(|id| i32::try_from(id).ok()).ok_or(Unusual)?),
        None => None,
    };
    Ok(Field {
        id,
        name: json.get("name").and_then(Value::as_str).ok_or(Unusual)?.to_owned(),
        node: node(json.get("type").ok_or(Unusual)?, named, depth)?,
    })
}

/// Enums do not occur in manifests.
fn primitive(name: &str) -> Option<Node> {
    Some(match name {
        "null" => Node::Null,
        "boolean" => Node::Boolean,
        "int" => Node::Int,
        "long" => Node::Long,
        "float" => Node::Float,
        "double" => Node::Double,
        "bytes" => Node::Bytes,
        "string" => Node::String,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_types_are_put_in_where_they_are_referred_to() {
        let schema = Node::parse(
            br#"{"type": "record", "name": "r", "fields": [
                {"name": "a", "type": {"type": "fixed", "name": "f4", "size": 4}, "field-id": 1},
                {"name": "b", "type": ["null", "f4"], "field-id": 2},
                {"name": "c", "type": {"type": {"type": "array", "items": "long", "element-id": 9}}}]}"#,
        )
        .unwrap();
        let fields = schema.record().unwrap();
        assert_eq!(fields[1].node, Node::Union(vec![Node::Null, Node::Fixed(4)]));
        assert_eq!((fields[0].id, fields[2].id), (Some(1), None));
        assert_eq!(fields[2].node, Node::Array(Box::new(Node::Long)));
    }

    #[test]
    fn what_holds_itself_or_is_unknown_is_unusual() {
        let own = br#"{"type": "record", "name": "r", "fields": [{"name": "a", "type": ["null", "r"]}]}"#;
        let deep = [b"[".repeat(100), b"\"int\"".to_vec(), b"]".repeat(100)].concat();
        for schema in [own.as_slice(), &deep, b"\"enum\"", b"{}", b"7", b"nonsense"] {
            assert!(Node::parse(schema).is_err(), "{}", String::from_utf8_lossy(schema));
        }
    }
}
