//! Versions of the state that one program reads from another one, checked before one replaces the
//! other.

use crate::parts::qcow2;
use keeper::{OLDEST_PROTOCOL, PROTOCOL};
use std::collections::BTreeMap;
use std::fmt;

/// Arguments with which a program prints its versions of state.
pub const VERSIONS: [&str; 2] = ["keep", "--versions"];

/// Name of the protocol between a serving process and its keeper, in the list of versions.
const KEEPER: &str = "keeper";
/// Version of the record of a process's configuration (`super::configuration`), and of the records
/// of connections and disks.
const GLUE: u32 = 1;

/// Versions of each kind of state: the one that is written, and the oldest one that is read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Versions(BTreeMap<String, (u32, u32)>);

impl Versions {
    /// Returns the versions of state that this program reads and writes.
    pub fn own() -> Self {
        let all = [
            (KEEPER, (PROTOCOL, OLDEST_PROTOCOL)),
            ("configuration", (GLUE, GLUE)),
            (
                "state-memory",
                (state_memory::VERSION, state_memory::OLDEST_READ),
            ),
            (
                "controller",
                (controller::STATE_VERSION, controller::STATE_OLDEST_READ),
            ),
            (
                "vfio-user",
                (vfio_user::SESSION_VERSION, vfio_user::SESSION_OLDEST_READ),
            ),
            ("qcow2", (qcow2::JOURNAL_VERSION, qcow2::JOURNAL_VERSION)),
        ];
        Self(all.map(|(name, both)| (name.to_owned(), both)).into())
    }

    /// Returns the version of the keeper's protocol that the program uses.
    pub fn keeper(&self) -> u32 {
        self.0.get(KEEPER).map_or(0, |(writes, _)| *writes)
    }

    /// Parses the output of another program, as [`Versions`] writes it.
    pub fn read(text: &str) -> Option<Self> {
        let line = |line: &str| {
            let mut words = line.split(' ');
            let name = words.next()?.to_owned();
            let both = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
            words.next().is_none().then_some((name, both))
        };
        let all: Option<BTreeMap<_, _>> = text.trim_end().lines().map(line).collect();
        all.filter(|all| !all.is_empty()).map(Self)
    }

    /// Checks that this version can continue from the state of the version before, and that the
    /// version before can continue from this one's, should it fail.
    ///
    /// # Errors
    /// The reason why not, in words.
    pub fn follows(&self, before: &Self) -> Result<(), String> {
        if !self.0.keys().eq(before.0.keys()) {
            return Err("the new program keeps other things".to_owned());
        }
        for ((name, (new, new_reads)), (old, old_reads)) in self.0.iter().zip(before.0.values()) {
            // Both processes speak the older one of their versions.
            let speaks_older = name == KEEPER && new >= old_reads;
            if new_reads > old {
                return Err(format!(
                    "the new program reads version {new_reads} of {name} and later, and {old} is \
                     what there is"
                ));
            }
            if new < old_reads || new > old && !speaks_older {
                return Err(format!(
                    "the new program writes version {new} of {name}, which the present one could \
                     not go on with: it reads {old_reads} to {old}"
                ));
            }
        }
        Ok(())
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, (writes, reads)) in &self.0 {
            writeln!(f, "{name} {writes} {reads}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_follows_only_readable_versions() {
        let own = Versions::own();
        assert_eq!(Versions::read(&own.to_string()), Some(own.clone()));
        own.follows(&own).unwrap();
        for nonsense in ["", "a", "a 1", "a b c", "a 1 2 3", "vnvme: error"] {
            assert_eq!(Versions::read(nonsense), None, "{nonsense}");
        }
        let of = |both| Versions([("state".to_owned(), both)].into());
        for (old, new, fits) in [
            ((3, 2), (3, 3), true),
            ((3, 2), (2, 1), true),
            ((3, 2), (1, 1), false),
            ((3, 2), (4, 2), false),
            ((3, 2), (4, 4), false),
            ((3, 2), (3, 4), false),
        ] {
            assert_eq!(of(new).follows(&of(old)).is_ok(), fits, "{old:?} {new:?}");
        }
        assert!(own.follows(&of((1, 1))).is_err());
        // A keeper and a serving process of two versions speak the older one.
        let of = |both| Versions([(KEEPER.to_owned(), both)].into());
        for (old, new, fits) in [
            ((2, 2), (3, 2), true),
            ((3, 2), (2, 2), true),
            ((3, 2), (4, 3), true),
            ((3, 3), (2, 2), false),
            ((2, 2), (4, 3), false),
        ] {
            assert_eq!(of(new).follows(&of(old)).is_ok(), fits, "{old:?} {new:?}");
        }
    }
}
