//! Msgpack values: a borrowing, bounded reader and a writer.

use rmp::Marker;

/// Arrays and maps nested deeper than this are refused.
const MAX_DEPTH: u32 = 16;

/// One msgpack value; strings and binaries point into the buffer that they were read from.
#[derive(Debug, Clone, PartialEq)]
pub enum Value<'a> {
    Nil,
    Bool(bool),
    Unsigned(u64),
    Negative(i64),
    Float(f64),
    /// A string or a binary: names are bytes on Linux, so the difference is never looked at.
    Bytes(&'a [u8]),
    Array(Vec<Value<'a>>),
    Map(Vec<(Value<'a>, Value<'a>)>),
}

/// The bytes are not one msgpack value (with nothing behind it), or not of the type that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mismatch;

impl<'a> Value<'a> {
    /// The one value that `bytes` consist of. Extension types are refused.
    pub fn read(mut bytes: &'a [u8]) -> Result<Value<'a>, Mismatch> {
        let value = read(&mut bytes, 0)?;
        if bytes.is_empty() {
            Ok(value)
        } else {
            Err(Mismatch)
        }
    }

    /// The value under `key`; Nil where it is absent or this is no map.
    pub fn get(&self, key: &str) -> &Value<'a> {
        let Value::Map(entries) = self else {
            return &Value::Nil;
        };
        entries
            .iter()
            .find(|(name, _)| *name == Value::Bytes(key.as_bytes()))
            .map_or(&Value::Nil, |(_, value)| value)
    }

    /// None for Nil, else what `read` makes of it.
    pub fn optional<T>(
        &self,
        read: impl FnOnce(&Self) -> Result<T, Mismatch>,
    ) -> Result<Option<T>, Mismatch> {
        match self {
            Value::Nil => Ok(None),
            value => read(value).map(Some),
        }
    }

    pub fn boolean(&self) -> Result<bool, Mismatch> {
        match self {
            Value::Bool(value) => Ok(*value),
            _ => Err(Mismatch),
        }
    }

    pub fn unsigned<T: TryFrom<u64>>(&self) -> Result<T, Mismatch> {
        match self {
            Value::Unsigned(value) => T::try_from(*value).map_err(|_| Mismatch),
            _ => Err(Mismatch),
        }
    }

    pub fn signed(&self) -> Result<i64, Mismatch> {
        match self {
            Value::Unsigned(value) => i64::try_from(*value).map_err(|_| Mismatch),
            Value::Negative(value) => Ok(*value),
            _ => Err(Mismatch),
        }
    }

    pub fn bytes(&self) -> Result<Vec<u8>, Mismatch> {
        match self {
            Value::Bytes(value) => Ok(value.to_vec()),
            _ => Err(Mismatch),
        }
    }

    pub fn text(&self) -> Result<String, Mismatch> {
        String::from_utf8(self.bytes()?).map_err(|_| Mismatch)
    }

    pub fn array(&self) -> Result<&[Value<'a>], Mismatch> {
        match self {
            Value::Array(items) => Ok(items),
            _ => Err(Mismatch),
        }
    }

    pub fn map(&self) -> Result<&[(Value<'a>, Value<'a>)], Mismatch> {
        match self {
            Value::Map(entries) => Ok(entries),
            _ => Err(Mismatch),
        }
    }
}

fn take<'a>(bytes: &mut &'a [u8], length: usize) -> Result<&'a [u8], Mismatch> {
    let (head, tail) = bytes.split_at_checked(length).ok_or(Mismatch)?;
    *bytes = tail;
    Ok(head)
}

/// A big-endian number of `width` bytes, at most 8.
fn number(bytes: &mut &[u8], width: usize) -> Result<u64, Mismatch> {
    Ok(take(bytes, width)?
        .iter()
        .fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
}

fn length(bytes: &mut &[u8], width: usize) -> Result<usize, Mismatch> {
    number(bytes, width).map(|length| length as usize)
}

fn signed<'a>(value: i64) -> Value<'a> {
    u64::try_from(value).map_or(Value::Negative(value), Value::Unsigned)
}

fn read<'a>(bytes: &mut &'a [u8], depth: u32) -> Result<Value<'a>, Mismatch> {
    if depth > MAX_DEPTH {
        return Err(Mismatch);
    }
    let marker = Marker::from_u8(take(bytes, 1)?[0]);
    Ok(match marker {
        Marker::Null => Value::Nil,
        Marker::True => Value::Bool(true),
        Marker::False => Value::Bool(false),
        Marker::FixPos(value) => Value::Unsigned(u64::from(value)),
        Marker::FixNeg(value) => Value::Negative(i64::from(value)),
        Marker::U8 => Value::Unsigned(number(bytes, 1)?),
        Marker::U16 => Value::Unsigned(number(bytes, 2)?),
        Marker::U32 => Value::Unsigned(number(bytes, 4)?),
        Marker::U64 => Value::Unsigned(number(bytes, 8)?),
        Marker::I8 => signed(i64::from(number(bytes, 1)? as i8)),
        Marker::I16 => signed(i64::from(number(bytes, 2)? as i16)),
        Marker::I32 => signed(i64::from(number(bytes, 4)? as i32)),
        Marker::I64 => signed(number(bytes, 8)? as i64),
        Marker::F32 => Value::Float(f64::from(f32::from_bits(number(bytes, 4)? as u32))),
        Marker::F64 => Value::Float(f64::from_bits(number(bytes, 8)?)),
        Marker::FixStr(size) => Value::Bytes(take(bytes, usize::from(size))?),
        Marker::Str8 | Marker::Bin8 => sized(bytes, 1)?,
        Marker::Str16 | Marker::Bin16 => sized(bytes, 2)?,
        Marker::Str32 | Marker::Bin32 => sized(bytes, 4)?,
        Marker::FixArray(count) => array(bytes, usize::from(count), depth)?,
        Marker::Array16 => {
            let count = length(bytes, 2)?;
            array(bytes, count, depth)?
        }
        Marker::Array32 => {
            let count = length(bytes, 4)?;
            array(bytes, count, depth)?
        }
        Marker::FixMap(count) => map(bytes, usize::from(count), depth)?,
        Marker::Map16 => {
            let count = length(bytes, 2)?;
            map(bytes, count, depth)?
        }
        Marker::Map32 => {
            let count = length(bytes, 4)?;
            map(bytes, count, depth)?
        }
        _ => return Err(Mismatch),
    })
}

fn sized<'a>(bytes: &mut &'a [u8], width: usize) -> Result<Value<'a>, Mismatch> {
    let size = length(bytes, width)?;
    Ok(Value::Bytes(take(bytes, size)?))
}

/// `count` is the sender's word, so nothing is allocated for more items than there are bytes.
fn array<'a>(bytes: &mut &'a [u8], count: usize, depth: u32) -> Result<Value<'a>, Mismatch> {
    if count > bytes.len() {
        return Err(Mismatch);
    }
    (0..count)
        .map(|_| read(bytes, depth + 1))
        .collect::<Result<_, _>>()
        .map(Value::Array)
}

fn map<'a>(bytes: &mut &'a [u8], count: usize, depth: u32) -> Result<Value<'a>, Mismatch> {
    if count > bytes.len() {
        return Err(Mismatch);
    }
    (0..count)
        .map(|_| Ok((read(bytes, depth + 1)?, read(bytes, depth + 1)?)))
        .collect::<Result<_, _>>()
        .map(Value::Map)
}

/// Writes msgpack values one after the other; an array or a map is its count, then its items.
#[derive(Debug, Default)]
pub struct Writer {
    out: Vec<u8>,
}

/// A Vec takes every write, so the results of rmp's encoders say nothing here.
const INFALLIBLE: &str = "writing to memory";

impl Writer {
    pub fn new() -> Self {
        Writer::default()
    }

    pub fn finish(self) -> Vec<u8> {
        self.out
    }

    pub fn array(mut self, count: usize) -> Self {
        rmp::encode::write_array_len(&mut self.out, count as u32).expect(INFALLIBLE);
        self
    }

    pub fn map(mut self, count: usize) -> Self {
        rmp::encode::write_map_len(&mut self.out, count as u32).expect(INFALLIBLE);
        self
    }

    pub fn text(mut self, value: &str) -> Self {
        rmp::encode::write_str(&mut self.out, value).expect(INFALLIBLE);
        self
    }

    pub fn bytes(mut self, value: &[u8]) -> Self {
        rmp::encode::write_bin(&mut self.out, value).expect(INFALLIBLE);
        self
    }

    pub fn unsigned(mut self, value: u64) -> Self {
        rmp::encode::write_uint(&mut self.out, value).expect(INFALLIBLE);
        self
    }

    pub fn signed(mut self, value: i64) -> Self {
        rmp::encode::write_sint(&mut self.out, value).expect(INFALLIBLE);
        self
    }

    pub fn float(mut self, value: f64) -> Self {
        rmp::encode::write_f64(&mut self.out, value).expect(INFALLIBLE);
        self
    }

    pub fn boolean(mut self, value: bool) -> Self {
        rmp::encode::write_bool(&mut self.out, value).expect(INFALLIBLE);
        self
    }

    pub fn nil(mut self) -> Self {
        rmp::encode::write_nil(&mut self.out).expect(INFALLIBLE);
        self
    }

    /// Nil for None, else what `write` writes.
    pub fn optional<T>(self, value: Option<T>, write: impl FnOnce(Self, T) -> Self) -> Self {
        match value {
            None => self.nil(),
            Some(value) => write(self, value),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_again() {
        let bytes = Writer::new()
            .map(5)
            .text("a")
            .signed(-300)
            .text("b")
            .bytes(b"\xff")
            .text("c")
            .array(2)
            .nil()
            .boolean(true)
            .text("d")
            .unsigned(u64::MAX)
            .text("e")
            .float(0.5)
            .finish();
        let value = Value::read(&bytes).unwrap();
        assert_eq!(value.get("a").signed(), Ok(-300));
        assert_eq!(value.get("b").bytes(), Ok(vec![255]));
        assert_eq!(
            value.get("c"),
            &Value::Array(vec![Value::Nil, Value::Bool(true)])
        );
        assert_eq!(value.get("d").unsigned(), Ok(u64::MAX));
        assert_eq!(value.get("e"), &Value::Float(0.5));
        assert_eq!(value.get("f"), &Value::Nil);
    }

    #[test]
    fn numbers_that_do_not_fit_are_refused() {
        assert_eq!(Value::Unsigned(300).unsigned::<u8>(), Err(Mismatch));
        assert_eq!(Value::Negative(-1).unsigned::<u64>(), Err(Mismatch));
        assert_eq!(Value::Unsigned(u64::MAX).signed(), Err(Mismatch));
    }

    #[test]
    fn hostile_bytes_are_refused_without_a_panic() {
        let deep = [0x91_u8; 100_000];
        for bytes in [
            &b""[..],
            b"\xc1",
            b"\xdf\xff\xff\xff\xff",
            b"\xdd\xff\xff\xff\xff\x01",
            b"\xc6\xff\xff\xff\xffx",
            b"\x01\x01",
            b"\xd4\x00\x00",
            &deep,
        ] {
            assert_eq!(Value::read(bytes), Err(Mismatch));
        }
    }
}
