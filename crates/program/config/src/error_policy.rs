//! Error policy of requests, as options state it.

use clap::ValueEnum;
use control::api;
use serde::Deserialize;
use volume::{ErrorAction, OnError};

/// Error policy for reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnReadError {
    /// Report the error to the guest.
    #[default]
    Report,
    /// Retry for 20 seconds with growing pauses, then report the error.
    Retry,
    /// Hold the request and all later ones until "vnvme resume".
    Stop,
}

/// Error policy for writes, zeroing and deallocation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnWriteError {
    /// Report the error to the guest.
    #[default]
    Report,
    /// Retry for 20 seconds with growing pauses, then report the error.
    Retry,
    /// Hold the request and all later ones until "vnvme resume".
    Stop,
    /// Like stop when space runs out, otherwise like report.
    EnospcStop,
}

/// Converts actions between the enums of the configuration, the management API and the volumes. The
/// one list of all actions names for each the choice for reads that stands for it. An action that
/// one of the enums or this list lacks is a compile error.
macro_rules! conversions {
    ($($action:ident => $read:ident,)*) => {
        impl From<OnWriteError> for ErrorAction {
            fn from(action: OnWriteError) -> Self {
                match action {
                    $(OnWriteError::$action => Self::$action,)*
                }
            }
        }

        impl From<api::ErrorAction> for OnWriteError {
            fn from(action: api::ErrorAction) -> Self {
                match action {
                    $(api::ErrorAction::$action => Self::$action,)*
                }
            }
        }

        impl From<api::ErrorAction> for OnReadError {
            fn from(action: api::ErrorAction) -> Self {
                match action {
                    $(api::ErrorAction::$action => Self::$read,)*
                }
            }
        }

        /// Returns the action of a volume as the management API names it.
        pub fn shown(action: ErrorAction) -> api::ErrorAction {
            match action {
                $(ErrorAction::$action => api::ErrorAction::$action,)*
            }
        }
    };
}

conversions! {
    Report => Report,
    Retry => Retry,
    Stop => Stop,
    EnospcStop => Report,
}

impl From<OnReadError> for ErrorAction {
    fn from(action: OnReadError) -> Self {
        match action {
            OnReadError::Report => Self::Report,
            OnReadError::Retry => Self::Retry,
            OnReadError::Stop => Self::Stop,
        }
    }
}

/// Returns the error policy of a configuration entry.
pub fn policy(read: Option<OnReadError>, write: Option<OnWriteError>) -> OnError {
    OnError {
        read: read.unwrap_or_default().into(),
        write: write.unwrap_or_default().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Row;
    use crate::options::tables::{on_read_error, on_write_error};
    use crate::spec::NamespaceSpec;

    fn names<A: ValueEnum>() -> String {
        let all = A::value_variants().iter();
        let all = all.filter_map(ValueEnum::to_possible_value);
        let names: Vec<String> = all.map(|value| value.get_name().to_owned()).collect();
        names.join("|")
    }

    #[test]
    fn actions_have_one_name_in_options_and_api() {
        let read: Row<NamespaceSpec> = on_read_error(|ns| &mut ns.on_read_error);
        let write: Row<NamespaceSpec> = on_write_error(|ns| &mut ns.on_write_error);
        assert_eq!(read.form, names::<OnReadError>());
        assert_eq!(write.form, names::<OnWriteError>());
        let shown_all: Vec<_> = ErrorAction::ALL
            .iter()
            .map(|action| shown(*action))
            .collect();
        let named: Vec<_> = shown_all.iter().map(|action| action.name()).collect();
        assert_eq!(named.join("|"), write.form);
        let reads = shown_all.iter().filter(|action| action.is_for_reads());
        let reads: Vec<_> = reads.map(|action| action.name()).collect();
        assert_eq!(reads.join("|"), read.form);
        for action in shown_all {
            let there = ErrorAction::from(OnWriteError::from(action));
            assert_eq!(shown(there), action);
            let there = ErrorAction::from(OnReadError::from(action));
            assert!(!action.is_for_reads() || shown(there) == action);
        }
    }
}
