//! Messages to a keeper: lines of a datagram (sd_notify(3)).

/// Version of the protocol between the keeper process and the serving process.
///
/// 2: the first one. 3: the keeper states its version, and tells its process ID when another
/// process has become the keeper.
pub const PROTOCOL: u32 = 3;
/// Oldest version of the keeper's protocol that this program understands.
pub const OLDEST_PROTOCOL: u32 = 2;

/// Maximum length in bytes of a kept descriptor's name. systemd's maximum is 255.
pub const MAX_NAME: usize = 64;

/// Maximum length in bytes of a message, as with systemd (NOTIFY_BUFFER_MAX).
pub(crate) const MAX_TEXT: usize = 4096;

/// Prefix of names under which the keeper process keeps the first descriptor until it ends: a
/// serving process that was taken over later can change none of them. systemd knows no such thing,
/// and keeps nothing that has to last.
pub const LASTING: &str = "lasting.";

/// Returns whether a descriptor may have this name: letters, digits, dots, dashes and underlines.
/// systemd takes more, but for control characters and colons.
pub fn is_name(name: &str) -> bool {
    let known = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(known)
}

/// Request of a serving process to its keeper.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Request<'a> {
    /// Keep the attached descriptor under this name.
    Store(&'a str),
    /// Close the descriptor of this name.
    Remove(&'a str),
    /// Close the attached descriptor when all messages before it have been handled.
    Barrier,
    /// Replace this process by the program now installed at its path.
    Upgrade,
    /// Pass these lines on to the service manager.
    Tell(Vec<&'a str>),
}

/// Names of the lines that are passed on to a service manager.
const TOLD: [&str; 6] = [
    "READY",
    "STOPPING",
    "RELOADING",
    "MONOTONIC_USEC",
    "WATCHDOG",
    "STATUS",
];

/// Parses a message to the keeper. Returns `None` for an invalid message, of which nothing is
/// executed. Lines with unknown names are ignored, as with systemd.
pub(crate) fn parse(text: &[u8]) -> Option<Request<'_>> {
    let text = std::str::from_utf8(text).ok()?;
    if text.len() > MAX_TEXT || text.bytes().any(|byte| byte < b' ' && byte != b'\n') {
        return None;
    }
    let (mut store, mut remove, mut barrier, mut upgrade) = (false, false, false, false);
    let mut name = None;
    let mut told = Vec::new();
    for line in text.split('\n').filter(|line| !line.is_empty()) {
        let (key, value) = line.split_once('=')?;
        match (key, value) {
            ("FDSTORE", "1") => store = true,
            ("FDSTOREREMOVE", "1") => remove = true,
            ("BARRIER", "1") => barrier = true,
            ("UPGRADE", "1") => upgrade = true,
            ("FDNAME", value) if name.is_none() && is_name(value) => name = Some(value),
            // Kept descriptors are not polled.
            ("FDPOLL", "0") => {}
            ("FDSTORE" | "FDSTOREREMOVE" | "BARRIER" | "FDNAME" | "FDPOLL" | "UPGRADE", _) => {
                return None;
            }
            (key, _) if TOLD.contains(&key) => told.push(line),
            _ => {}
        }
    }
    match (store, remove, barrier, upgrade, name, told.is_empty()) {
        (true, false, false, false, Some(name), true) => Some(Request::Store(name)),
        (false, true, false, false, Some(name), true) => Some(Request::Remove(name)),
        (false, false, true, false, None, true) => Some(Request::Barrier),
        (false, false, false, true, None, true) => Some(Request::Upgrade),
        (false, false, false, false, None, false) => Some(Request::Tell(told)),
        _ => None,
    }
}

/// Returns the message that asks the keeper to hold the attached descriptor.
pub(crate) fn store(name: &str) -> String {
    format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0\n")
}

/// Returns the message that asks the keeper to close a descriptor.
pub(crate) fn remove(name: &str) -> String {
    format!("FDSTOREREMOVE=1\nFDNAME={name}\n")
}

/// Barrier line, which must stand alone in its message (sd_notify_barrier(3)).
pub(crate) const BARRIER: &str = "BARRIER=1";

/// Line that asks the keeper process for an upgrade. systemd does not know this line.
pub(crate) const UPGRADE: &str = "UPGRADE=1";

/// Prefix of the keeper process's answer that refuses an upgrade; the reason follows.
pub(crate) const NO_UPGRADE: &str = "NO_UPGRADE=";

/// Prefix of the line with the process ID of the present keeper.
pub(crate) const KEEPER: &str = "KEEPER=";

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn printed_messages_parse_back() {
        assert_eq!(
            parse(store("d7.12").as_bytes()),
            Some(Request::Store("d7.12"))
        );
        assert_eq!(
            parse(remove("a_b-c").as_bytes()),
            Some(Request::Remove("a_b-c"))
        );
        assert_eq!(parse(BARRIER.as_bytes()), Some(Request::Barrier));
        assert_eq!(parse(UPGRADE.as_bytes()), Some(Request::Upgrade));
        let told = b"RELOADING=1\nMONOTONIC_USEC=7\nX_OTHER=2\n";
        let lines = vec!["RELOADING=1", "MONOTONIC_USEC=7"];
        assert_eq!(parse(told), Some(Request::Tell(lines)));
    }

    #[test]
    fn malformed_messages_are_refused() {
        let long = "a".repeat(MAX_NAME + 1);
        let wrong = [
            "",
            "\n",
            "FDSTORE=1",
            "FDSTORE=1\nFDNAME=",
            "FDSTORE=2\nFDNAME=a",
            "FDSTORE=1\nFDNAME=a:b",
            "FDSTORE=1\nFDNAME=a\nFDNAME=b",
            "FDSTORE=1\nFDNAME=a\nFDSTOREREMOVE=1",
            "FDSTORE=1\nFDNAME=a\nFDPOLL=1",
            "FDSTORE=1\nFDNAME=a\nREADY=1",
            "FDSTORE=1\nFDNAME=a\0",
            "BARRIER=1\nFDNAME=a",
            "BARRIER=1\nREADY=1",
            "UPGRADE=2",
            "UPGRADE=1\nBARRIER=1",
            "UPGRADE=1\nFDNAME=a",
            "FDNAME=a",
            "READY",
            "=1\nno line",
            &format!("FDSTORE=1\nFDNAME={long}"),
        ];
        for text in wrong {
            assert_eq!(parse(text.as_bytes()), None, "{text:?}");
        }
        assert_eq!(parse(b"FDSTORE=1\nFDNAME=a\xff"), None);
        assert_eq!(parse(&[b'a'; MAX_TEXT + 1]), None);
        assert_eq!(
            parse(b"MAINPID=1"),
            None,
            "the keeper stays the main process"
        );
    }

    proptest! {
        #[test]
        fn random_text_causes_no_panic(text in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Some(Request::Store(name) | Request::Remove(name)) = parse(&text) {
                prop_assert!(is_name(name));
            }
        }
    }
}
