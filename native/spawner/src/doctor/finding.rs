//! One line of the report, and its JSON: the fields of `Finding` in libdsec/schema.py.

use std::io;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Ok,
    /// Works with less, or slower.
    Degraded,
    /// Keeps sandboxes from starting.
    Missing,
    /// Not tried, for want of rights: it says nothing of the machine.
    Unknown,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            State::Ok => "ok",
            State::Degraded => "degraded",
            State::Missing => "missing",
            State::Unknown => "unknown",
        }
    }
}

/// What is looked for: its name, what its lack costs, and what to do about that.
pub struct Feature {
    pub name: &'static str,
    pub cost: &'static str,
    pub todo: &'static str,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Finding {
    pub feature: &'static str,
    pub state: State,
    /// What was found.
    pub detail: String,
    pub cost: &'static str,
    pub todo: &'static str,
}

impl Feature {
    pub fn found(&self, detail: impl Into<String>) -> Finding {
        Finding {
            feature: self.name,
            state: State::Ok,
            detail: detail.into(),
            cost: "",
            todo: "",
        }
    }

    pub fn lacking(&self, state: State, detail: impl Into<String>) -> Finding {
        Finding {
            feature: self.name,
            state,
            detail: detail.into(),
            cost: self.cost,
            todo: self.todo,
        }
    }

    /// Found if the trial went well. A refusal to somebody who isn't root says nothing of the kernel.
    pub fn tried(&self, trial: io::Result<String>, without: State) -> Finding {
        match trial {
            Ok(detail) => self.found(detail),
            Err(error) if is_for_root(&error) => self.untried(),
            Err(error) => self.lacking(without, error.to_string()),
        }
    }

    fn untried(&self) -> Finding {
        Finding {
            feature: self.name,
            state: State::Unknown,
            detail: "not tried: needs root".to_owned(),
            cost: "",
            todo: "run it as root",
        }
    }
}

/// Whether root might have got another answer.
pub fn is_for_root(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied && !is_root()
}

fn is_root() -> bool {
    // SAFETY: takes nothing, always succeeds.
    unsafe { libc::geteuid() == 0 }
}

/// The findings as one JSON array, an object a line.
pub fn to_json(findings: &[Finding]) -> String {
    let lines: Vec<String> = findings.iter().map(object).collect();
    format!("[\n{}\n]\n", lines.join(",\n"))
}

fn object(finding: &Finding) -> String {
    format!(
        "{{\"feature\": {}, \"state\": {}, \"detail\": {}, \"cost\": {}, \"todo\": {}}}",
        string(finding.feature),
        string(finding.state.name()),
        string(&finding.detail),
        string(finding.cost),
        string(finding.todo),
    )
}

/// A JSON string (RFC 8259, section 7).
fn string(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for character in text.chars() {
        match character {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            control if control < ' ' => quoted.push_str(&format!("\\u{:04x}", u32::from(control))),
            other => quoted.push(other),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    const FEATURE: Feature = Feature {
        name: "it",
        cost: "much",
        todo: "something",
    };

    #[test]
    fn what_is_there_costs_nothing() {
        assert_eq!(
            (FEATURE.found("v2").cost, FEATURE.found("v2").todo),
            ("", "")
        );
    }

    #[test]
    fn a_trial_that_fails_tells_why_and_what_it_costs() {
        let finding = FEATURE.tried(
            Err(io::Error::from_raw_os_error(libc::EINVAL)),
            State::Missing,
        );
        assert_eq!((finding.state, finding.cost), (State::Missing, "much"));
        assert!(finding.detail.contains("Invalid argument"));
    }

    #[test]
    fn findings_become_json() {
        let json = to_json(&[FEATURE.lacking(State::Degraded, "a \"b\"\n\\c")]);
        let line = r#"{"feature": "it", "state": "degraded", "detail": "a \"b\"\u000a\\c", "cost": "much", "todo": "something"}"#;
        assert_eq!(json, format!("[\n{line}\n]\n"));
        assert_eq!(to_json(&[]), "[\n\n]\n");
    }
}
