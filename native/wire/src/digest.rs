//! The names of blobs and layers.

/// Whether `text` is a sha256 digest in hexadecimal, as it stands in messages and file names.
#[must_use]
pub fn is_digest(text: &str) -> bool {
    let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    text.len() == 64 && text.bytes().all(is_hex)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_lower_case_hex_of_one_length() {
        assert!(is_digest(&"a0".repeat(32)));
        for bad in [
            "",
            "a0",
            &"A0".repeat(32),
            &"../".repeat(22)[..64],
            &"g0".repeat(32),
        ] {
            assert!(!is_digest(bad), "{bad:?}");
        }
    }
}
