//! File of the hosts that may connect to a subsystem, with the secrets that authenticate them.

use anyhow::{Context, Result, anyhow, bail};
use dhchap::{Secret, Secrets};
use fabrics_target::HostKey;
use nvme::identify::Nqn;
use std::path::Path;

/// Reads a file of host keys.
///
/// # Errors
/// A message when the file cannot be read or has an invalid line. The message contains the line
/// number, and never the content of the line.
/// content.
pub fn read(path: &Path) -> Result<Vec<HostKey>> {
    let text = dhchap::read_private(path).with_context(|| path.display().to_string())?;
    parse(&text).with_context(|| path.display().to_string())
}

/// Parses one line per host: its NQN, its secret, and optionally the secret of the subsystem.
fn parse(text: &str) -> Result<Vec<HostKey>> {
    let mut keys: Vec<HostKey> = Vec::new();
    for (line, number) in text.lines().zip(1..) {
        let mut words = line.split_ascii_whitespace();
        let Some(nqn) = words.next().filter(|word| !word.starts_with('#')) else {
            continue;
        };
        let at = || format!("line {number}");
        let secret = |word: &str| Secret::parse(word).with_context(at);
        if Nqn::new(nqn).is_none() || !nqn.starts_with("nqn.") {
            bail!("{}: does not begin with a host NQN", at());
        }
        if keys.iter().any(|key| key.nqn == nqn) {
            bail!("{}: {nqn} is listed twice", at());
        }
        let host = words.next().map(secret).transpose()?;
        let host = host.ok_or_else(|| anyhow!("{}: {nqn} has no secret", at()))?;
        let controller = words.next().map(secret).transpose()?;
        if words.next().is_some() {
            bail!("{}: unexpected text after the secrets", at());
        }
        if controller.as_ref() == Some(&host) {
            // With equal secrets, the host's response could be replayed to it ("NVMe Base 2.1",
            // 8.3.5.5.7).
            bail!("{}: the two secrets must differ", at());
        }
        keys.push(HostKey {
            nqn: nqn.into(),
            secrets: Secrets { host, controller },
        });
    }
    if keys.is_empty() {
        // An empty list differs from a missing file, with which all hosts may connect.
        bail!("no host is listed, so none could connect");
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "DHHC-1:01:AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyAl7OaH:";
    const OTHER: &str = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:";

    #[test]
    fn host_keys_are_parsed_by_line() {
        let text = format!("# hosts\n\nnqn.2014-08.x:a {ONE}\n  nqn.2014-08.x:b\t{ONE} {OTHER}\n");
        let keys = parse(&text).unwrap();
        let names: Vec<&str> = keys.iter().map(|key| &*key.nqn).collect();
        assert_eq!(names, ["nqn.2014-08.x:a", "nqn.2014-08.x:b"]);
        assert!(keys[0].secrets.controller.is_none() && keys[1].secrets.controller.is_some());
    }

    #[test]
    fn malformed_host_key_error_names_line_without_secret() {
        for (text, why) in [
            ("# nobody\n".into(), "no host is listed"),
            (ONE.into(), "line 1: does not begin with"),
            (
                "nqn.2014-08.x:a".into(),
                "line 1: nqn.2014-08.x:a has no secret",
            ),
            (format!("\nnqn.2014-08.x:a {ONE}x"), "line 2"),
            (
                format!("nqn.2014-08.x:a {ONE} {OTHER} {ONE}"),
                "after the secrets",
            ),
            (format!("nqn.2014-08.x:a {ONE} {ONE}"), "must differ"),
            (
                format!("nqn.x:a {ONE}\nnqn.x:a {OTHER}"),
                "line 2: nqn.x:a is listed twice",
            ),
        ] {
            let said = format!("{:#}", parse(&text).unwrap_err());
            assert!(said.contains(why), "{said}");
            assert!(!said.contains("AQID") && !said.contains("ia6z"), "{said}");
        }
    }
}
