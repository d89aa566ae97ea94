//! Values put into the bytes of a data block (Avro specification 1.12, "Binary Encoding").

use super::schema::Node;
use super::{Unusual, Usual};

/// Writes which branch of a union follows and gives it; `None`: null. What is no union is its own branch.
pub(super) fn out_of<'n>(out: &mut Vec<u8>, node: &'n Node, there: bool) -> Usual<Option<&'n Node>> {
    let Node::Union(options) = node else {
        return if there && *node != Node::Null { Ok(Some(node)) } else { Err(Unusual) };
    };
    let index = options.iter().position(|option| (*option != Node::Null) == there).ok_or(Unusual)?;
    length(out, index)?;
    Ok(options.get(index).filter(|_| there))
}

/// An `int` or `long`.
pub(super) fn long(out: &mut Vec<u8>, node: &Node, value: Option<i64>) -> Usual<()> {
    match (out_of(out, node, value.is_some())?, value) {
        (None, None) => Ok(()),
        (Some(Node::Long), Some(value)) => {
            varint(out, value);
            Ok(())
        }
        (Some(Node::Int), Some(value)) if i32::try_from(value).is_ok() => {
            varint(out, value);
            Ok(())
        }
        _ => Err(Unusual),
    }
}

pub(super) fn text(out: &mut Vec<u8>, node: &Node, value: Option<&str>) -> Usual<()> {
    match (out_of(out, node, value.is_some())?, value) {
        (None, None) => Ok(()),
        (Some(Node::String), Some(value)) => sized(out, value.as_bytes()),
        _ => Err(Unusual),
    }
}

pub(super) fn raw(out: &mut Vec<u8>, node: &Node, value: Option<&[u8]>) -> Usual<()> {
    match (out_of(out, node, value.is_some())?, value) {
        (None, None) => Ok(()),
        (Some(Node::Bytes), Some(value)) => sized(out, value),
        _ => Err(Unusual),
    }
}

pub(super) fn sized(out: &mut Vec<u8>, bytes: &[u8]) -> Usual<()> {
    length(out, bytes.len())?;
    out.extend_from_slice(bytes);
    Ok(())
}

pub(super) fn length(out: &mut Vec<u8>, length: usize) -> Usual<()> {
    varint(out, i64::try_from(length).map_err(|_| Unusual)?);
    Ok(())
}

/// Zig-zag, seven bits a byte (Avro specification 1.12, "Binary Encoding").
pub(super) fn varint(out: &mut Vec<u8>, value: i64) {
    let mut rest = ((value << 1) ^ (value >> 63)).cast_unsigned();
    while rest >= 0x80 {
        out.push((rest & 0x7f) as u8 | 0x80);
        rest >>= 7;
    }
    out.push(rest as u8);
}

pub(super) fn boolean(out: &mut Vec<u8>, node: &Node, value: Option<bool>) -> Usual<()> {
    match (out_of(out, node, value.is_some())?, value) {
        (None, None) => Ok(()),
        (Some(Node::Boolean), Some(value)) => {
            out.push(u8::from(value));
            Ok(())
        }
        _ => Err(Unusual),
    }
}

/// A block of objects, if there are any; the next one begins empty.
pub(super) fn end_block(bytes: &mut Vec<u8>, block: &mut Vec<u8>, count: &mut i64, sync: &[u8]) -> Usual<()> {
    if *count > 0 {
        varint(bytes, *count);
        length(bytes, block.len())?;
        bytes.append(block);
        bytes.extend_from_slice(sync);
        *count = 0;
    }
    Ok(())
}
