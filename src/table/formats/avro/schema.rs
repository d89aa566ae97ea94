//! The schema of an Avro file with field ids and logical types (Avro specification 1.12, "Schema Declaration";
//! table spec, "Appendix A: Format-specific Requirements", Avro).

use std::collections::HashMap;

use datafusion::arrow::datatypes::TimeUnit;
use serde_json::{Map, Value};

use super::super::fault::{Decoded, Fault};
use super::super::named::{ELEMENT, KEY, NamedField, VALUE};

/// Levels of nesting; a type that holds itself would have no end.
const MAX_DEPTH: usize = 64;
/// Digits of a decimal number.
const MAX_PRECISION: u64 = 38;

/// A type as values of it are read.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::table) enum Node {
    Null,
    Boolean,
    Int,
    Date,
    TimeMillis,
    Long,
    TimeMicros,
    /// The file's own word on time zones is not heard: in an Iceberg table the column's type has it.
    Timestamp(TimeUnit),
    Float,
    Double,
    Bytes,
    Text,
    Enum(Vec<String>),
    Fixed(usize),
    /// In `size` bytes, or in as many as are told with each value.
    Decimal {
        size: Option<usize>,
        precision: u8,
        scale: i8,
    },
    Record(Vec<Field>),
    List {
        id: Option<i32>,
        element: Box<Node>,
    },
    /// Keys are texts.
    Map {
        key_id: Option<i32>,
        value_id: Option<i32>,
        value: Box<Node>,
    },
    /// A map as an array of records of a key and a value (logical type `map`), for keys that are no texts.
    Entries {
        key: Box<Field>,
        value: Box<Field>,
    },
    /// A union of null, which is branch `null_at`, and one type.
    Optional {
        null_at: i64,
        inner: Box<Node>,
    },
    /// Any other union: no Iceberg writer makes one, and it can only be skipped.
    Union(Vec<Node>),
}

#[derive(Clone, Debug, PartialEq)]
pub(in crate::table) struct Field {
    pub name: String,
    pub id: Option<i32>,
    pub node: Node,
}

impl Field {
    pub fn named(&self) -> NamedField {
        NamedField {
            name: self.name.clone(),
            id: self.id,
            children: self.node.children(),
            is_struct: self.node.is_struct(),
        }
    }
}

impl Node {
    fn is_struct(&self) -> bool {
        match self {
            Self::Record(_) => true,
            Self::Optional { inner, .. } => inner.is_struct(),
            _ => false,
        }
    }

    fn children(&self) -> Vec<NamedField> {
        let of = |name: &str, id: Option<i32>, node: &Self| NamedField {
            name: name.to_owned(),
            id,
            children: node.children(),
            is_struct: node.is_struct(),
        };
        match self {
            Self::Record(fields) => fields.iter().map(Field::named).collect(),
            Self::Optional { inner, .. } => inner.children(),
            Self::List { id, element } => vec![of(ELEMENT, *id, element)],
            Self::Map { key_id, value_id, value } => {
                vec![of(KEY, *key_id, &Self::Text), of(VALUE, *value_id, value)]
            }
            Self::Entries { key, value } => {
                vec![of(KEY, key.id, &key.node), of(VALUE, value.id, &value.node)]
            }
            _ => Vec::new(),
        }
    }
}

/// The columns of a file, from the JSON of its header.
pub(super) fn columns(json: &[u8]) -> Decoded<Vec<Field>> {
    let json: Value = serde_json::from_slice(json)
        .map_err(|e| Fault::corrupt(format!("its Avro schema is no JSON: {e}")))?;
    match Parser::default().node(&json, None, 0)? {
        Node::Record(fields) => Ok(fields),
        _ => Err(Fault::corrupt("its Avro schema is no record")),
    }
}

/// Named types as they were read, by their full names.
#[derive(Default)]
struct Parser {
    known: HashMap<String, Node>,
}

impl Parser {
    /// `space` is the namespace that names without one are of.
    fn node(&mut self, json: &Value, space: Option<&str>, depth: usize) -> Decoded<Node> {
        if depth > MAX_DEPTH {
            return Err(Fault::corrupt(format!("its Avro schema has more than {MAX_DEPTH} levels")));
        }
        match json {
            Value::String(name) => self.by_name(name, space),
            Value::Array(branches) => {
                let mut nodes = Vec::with_capacity(branches.len());
                for branch in branches {
                    nodes.push(self.node(branch, space, depth + 1)?);
                }
                Ok(union(nodes))
            }
            Value::Object(object) => self.object(object, space, depth),
            Value::Null | Value::Bool(_) | Value::Number(_) => Err(unknown(json)),
        }
    }

    fn by_name(&self, name: &str, space: Option<&str>) -> Decoded<Node> {
        if let Some(node) = primitive(name) {
            return Ok(node);
        }
        let full = space.map(|space| format!("{space}.{name}"));
        let found = full.and_then(|full| self.known.get(&full)).or_else(|| self.known.get(name));
        found.cloned().ok_or_else(|| unknown(&Value::String(name.to_owned())))
    }

    fn object(&mut self, object: &Map<String, Value>, space: Option<&str>, depth: usize) -> Decoded<Node> {
        let typed =
            object.get("type").ok_or_else(|| Fault::corrupt("a type of its Avro schema has no name"))?;
        let Some(kind) = typed.as_str() else { return self.node(typed, space, depth + 1) };
        let logical = object.get("logicalType").and_then(Value::as_str);
        let own_space = object.get("namespace").and_then(Value::as_str).or(space).map(str::to_owned);
        let space = own_space.as_deref();
        let inner = |this: &mut Self, key: &str| {
            let json =
                object.get(key).ok_or_else(|| Fault::corrupt(format!("its Avro schema has no {key}")))?;
            this.node(json, space, depth + 1)
        };
        let node = match kind {
            "record" => {
                let listed = object.get("fields").and_then(Value::as_array);
                let listed =
                    listed.ok_or_else(|| Fault::corrupt("a record of its Avro schema has no fields"))?;
                let mut fields = Vec::with_capacity(listed.len());
                for json in listed {
                    fields.push(self.field(json, space, depth + 1)?);
                }
                Node::Record(fields)
            }
            "array" => {
                let items = inner(self, "items")?;
                return entries(logical, items, id_of(object, "element-id")?);
            }
            "map" => {
                let value = Box::new(inner(self, "values")?);
                let (key_id, value_id) = (id_of(object, "key-id")?, id_of(object, "value-id")?);
                return Ok(Node::Map { key_id, value_id, value });
            }
            "fixed" => {
                let size =
                    object.get("size").and_then(Value::as_u64).and_then(|size| i32::try_from(size).ok());
                let size = size.and_then(|size| usize::try_from(size).ok());
                let size =
                    size.ok_or_else(|| Fault::corrupt("a fixed type of its Avro schema has no size"))?;
                match logical {
                    Some("decimal") => decimal(object, Some(size))?,
                    _ => Node::Fixed(size),
                }
            }
            "enum" => {
                let symbols = object.get("symbols").and_then(Value::as_array);
                let symbols =
                    symbols.ok_or_else(|| Fault::corrupt("an enum of its Avro schema has no symbols"))?;
                let texts: Option<Vec<_>> = symbols.iter().map(|s| s.as_str().map(str::to_owned)).collect();
                Node::Enum(texts.ok_or_else(|| Fault::corrupt("a symbol of an enum is no text"))?)
            }
            other => {
                let node = self.by_name(other, space)?;
                return match (logical, &node) {
                    (Some("decimal"), Node::Bytes) => decimal(object, None),
                    (Some(logical), _) => Ok(with_meaning(node, logical)),
                    (None, _) => Ok(node),
                };
            }
        };
        if let Some(name) = object.get("name").and_then(Value::as_str) {
            if let Some(space) = space {
                self.known.insert(format!("{space}.{name}"), node.clone());
            }
            self.known.insert(name.to_owned(), node.clone());
        }
        Ok(node)
    }

    fn field(&mut self, json: &Value, space: Option<&str>, depth: usize) -> Decoded<Field> {
        let object = json.as_object().ok_or_else(|| unknown(json))?;
        let name = object.get("name").and_then(Value::as_str);
        let name = name.ok_or_else(|| Fault::corrupt("a field of its Avro schema has no name"))?;
        let typed =
            object.get("type").ok_or_else(|| Fault::corrupt(format!("its field '{name}' has no type")))?;
        Ok(Field {
            name: name.to_owned(),
            id: id_of(object, "field-id")?,
            node: self.node(typed, space, depth)?,
        })
    }
}

fn id_of(object: &Map<String, Value>, key: &str) -> Decoded<Option<i32>> {
    let Some(id) = object.get(key) else { return Ok(None) };
    let id = id.as_i64().and_then(|id| i32::try_from(id).ok());
    id.map(Some).ok_or_else(|| Fault::corrupt(format!("a {key} of its Avro schema is no number")))
}

fn unknown(json: &Value) -> Fault {
    Fault::corrupt(format!("its Avro schema has an unknown type {json}"))
}

fn union(nodes: Vec<Node>) -> Node {
    let null_at = nodes.iter().position(|node| *node == Node::Null);
    match (nodes.as_slice(), null_at) {
        ([_, inner], Some(0)) => Node::Optional { null_at: 0, inner: Box::new(inner.clone()) },
        ([inner, _], Some(_)) => Node::Optional { null_at: 1, inner: Box::new(inner.clone()) },
        _ => Node::Union(nodes),
    }
}

fn entries(logical: Option<&str>, items: Node, id: Option<i32>) -> Decoded<Node> {
    match (logical, items) {
        (Some("map"), Node::Record(mut fields)) => {
            let at = |fields: &[Field], name: &str| fields.iter().position(|field| field.name == name);
            // Values are written in the order of the fields.
            match (at(&fields, KEY), at(&fields, VALUE), fields.len()) {
                (Some(0), Some(1), 2) => {
                    let value = fields.remove(1);
                    Ok(Node::Entries { key: Box::new(fields.remove(0)), value: Box::new(value) })
                }
                _ => Err(Fault::corrupt("a map of its Avro schema is no array of keys and values")),
            }
        }
        (Some("map"), _) => Err(Fault::corrupt("a map of its Avro schema is no array of records")),
        (_, items) => Ok(Node::List { id, element: Box::new(items) }),
    }
}

fn decimal(object: &Map<String, Value>, size: Option<usize>) -> Decoded<Node> {
    let number = |key: &str| object.get(key).and_then(Value::as_u64);
    let (precision, scale) = (number("precision").unwrap_or_default(), number("scale").unwrap_or_default());
    match (u8::try_from(precision), i8::try_from(scale)) {
        (Ok(digits), Ok(scale)) if (1..=MAX_PRECISION).contains(&precision) && scale as u64 <= precision => {
            Ok(Node::Decimal { size, precision: digits, scale })
        }
        _ => Err(Fault::corrupt(format!("its Avro schema has a decimal({precision}, {scale})"))),
    }
}

/// Unknown meanings, and those of other types, are ignored, as the specification says.
fn with_meaning(node: Node, logical: &str) -> Node {
    match (logical, &node) {
        ("date", Node::Int) => Node::Date,
        ("time-millis", Node::Int) => Node::TimeMillis,
        ("time-micros", Node::Long) => Node::TimeMicros,
        ("timestamp-millis" | "local-timestamp-millis", Node::Long) => Node::Timestamp(TimeUnit::Millisecond),
        ("timestamp-micros" | "local-timestamp-micros", Node::Long) => Node::Timestamp(TimeUnit::Microsecond),
        ("timestamp-nanos" | "local-timestamp-nanos", Node::Long) => Node::Timestamp(TimeUnit::Nanosecond),
        _ => node,
    }
}

fn primitive(name: &str) -> Option<Node> {
    Some(match name {
        "null" => Node::Null,
        "boolean" => Node::Boolean,
        "int" => Node::Int,
        "long" => Node::Long,
        "float" => Node::Float,
        "double" => Node::Double,
        "bytes" => Node::Bytes,
        "string" => Node::Text,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(fields: &str) -> Decoded<Vec<Field>> {
        columns(format!(r#"{{"type": "record", "name": "r", "fields": [{fields}]}}"#).as_bytes())
    }

    #[test]
    fn ids_are_found_at_every_depth() {
        let fields = parsed(
            r#"{"name": "l", "field-id": 1, "type": ["null", {"type": "array", "element-id": 2, "items": "long"}]},
               {"name": "m", "field-id": 3, "type": {"type": "map", "key-id": 4, "value-id": 5, "values": "int"}},
               {"name": "k", "field-id": 6, "type": {"type": "array", "logicalType": "map", "items":
                 {"type": "record", "name": "k7_v8", "fields": [
                   {"name": "key", "type": "int", "field-id": 7},
                   {"name": "value", "type": ["null", "string"], "field-id": 8}]}}}"#,
        )
        .unwrap();
        let ids: Vec<Vec<Option<i32>>> =
            fields.iter().map(|f| f.named().children.iter().map(|c| c.id).collect()).collect();
        assert_eq!(ids, [vec![Some(2)], vec![Some(4), Some(5)], vec![Some(7), Some(8)]]);
        assert!(matches!(fields[2].node, Node::Entries { .. }));
    }

    #[test]
    fn meanings_are_those_of_the_table_spec() {
        let fields = parsed(
            r#"{"name": "d", "type": {"type": "int", "logicalType": "date"}},
               {"name": "t", "type": {"type": "long", "logicalType": "timestamp-micros", "adjust-to-utc": false}},
               {"name": "n", "type": {"type": "long", "logicalType": "timestamp-nanos", "adjust-to-utc": true}},
               {"name": "u", "type": {"type": "fixed", "name": "uuid_fixed", "size": 16, "logicalType": "uuid"}},
               {"name": "v", "type": ["null", "uuid_fixed"]},
               {"name": "c", "type": {"type": "fixed", "name": "c", "size": 5, "logicalType": "decimal",
                 "precision": 10, "scale": 2}},
               {"name": "x", "type": {"type": "string", "logicalType": "no one knows"}}"#,
        )
        .unwrap();
        let nodes: Vec<Node> = fields.into_iter().map(|field| field.node).collect();
        let uuid = Node::Fixed(16);
        assert_eq!(
            nodes,
            [
                Node::Date,
                Node::Timestamp(TimeUnit::Microsecond),
                Node::Timestamp(TimeUnit::Nanosecond),
                uuid.clone(),
                Node::Optional { null_at: 0, inner: Box::new(uuid) },
                Node::Decimal { size: Some(5), precision: 10, scale: 2 },
                Node::Text,
            ]
        );
    }

    #[test]
    fn what_is_no_schema_is_told() {
        let deep = format!(r#"{{"name": "a", "type": {}"int"{}}}"#, "[".repeat(100), "]".repeat(100));
        let own = r#"{"name": "a", "type": ["null", "r"]}"#;
        let decimal =
            r#"{"name": "a", "type": {"type": "bytes", "logicalType": "decimal", "precision": 99}}"#;
        for fields in [deep.as_str(), own, decimal, "7", r#"{"name": "a"}"#, r#"{"name": "a", "type": "x"}"#]
        {
            assert!(matches!(parsed(fields), Err(Fault::Corrupt(_))), "{fields}");
        }
        for schema in [&b"\"long\""[..], b"{}", b"nonsense"] {
            assert!(columns(schema).is_err());
        }
    }
}
