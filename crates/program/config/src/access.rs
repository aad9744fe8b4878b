//! Access control of a socket, as options state it: users and groups by name or number, a mode in
//! octal digits.

use anyhow::{Context, Result, anyhow, bail};
use nix::unistd::{Group, User};
use rustix::fs::{Gid, Mode, Uid};
use std::fmt;
use std::str::FromStr;
use vfio_user::Access;

/// User or group as it was given: a name or a number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Principal(String);

impl FromStr for Principal {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.trim() {
            "" => Err("a name or a number is expected"),
            text if text.contains(|c: char| c.is_control() || matches!(c, ':' | '/')) => {
                Err("a name has no colon, slash or control character")
            }
            text => Ok(Self(text.to_owned())),
        }
    }
}

impl fmt::Display for Principal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Principal {
    /// Returns the number of a numeric user or group. The largest number is refused, since it
    /// stands for "no change".
    fn number(&self) -> Option<Result<u32>> {
        let digits = self.0.bytes().all(|byte| byte.is_ascii_digit());
        digits.then(|| match self.0.parse() {
            Ok(u32::MAX) | Err(_) => {
                Err(anyhow!("{self} is not a valid number of a user or group"))
            }
            Ok(number) => Ok(number),
        })
    }

    /// Returns the user ID.
    ///
    /// # Errors
    /// There is no user of that name.
    pub fn user(&self) -> Result<Uid> {
        if let Some(number) = self.number() {
            return number.map(Uid::from_raw);
        }
        match User::from_name(&self.0).with_context(|| format!("user \"{self}\""))? {
            Some(user) => Ok(Uid::from_raw(user.uid.as_raw())),
            None => bail!(
                "there is no user \"{self}\" on this machine; name one that \"getent passwd\" shows, or \
                 make it with: useradd {self}"
            ),
        }
    }

    /// Returns the group ID.
    ///
    /// # Errors
    /// There is no group of that name.
    pub fn group(&self) -> Result<Gid> {
        if let Some(number) = self.number() {
            return number.map(Gid::from_raw);
        }
        match Group::from_name(&self.0).with_context(|| format!("group \"{self}\""))? {
            Some(group) => Ok(Gid::from_raw(group.gid.as_raw())),
            None => bail!(
                "there is no group \"{self}\" on this machine; name one that \"getent group\" shows, or \
                 make it with: groupadd {self}"
            ),
        }
    }
}

/// File mode of a Unix socket, written in octal digits such as `0660`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketMode(u32);

impl fmt::Display for SocketMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

impl FromStr for SocketMode {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let octal = u32::from_str_radix(text, 8).ok();
        let octal = octal.filter(|_| !text.starts_with('+') && (3..=4).contains(&text.len()));
        let mode = octal.filter(|mode| *mode <= 0o777).ok_or(
            "a mode is three octal digits, such as 0660: read 4 and write 2, of owner, group and \
             others",
        )?;
        match mode & 0o222 {
            0 => Err(
                "nobody could connect with this mode: connecting needs the right to write, \
                      as in 0660",
            ),
            _ => Ok(Self(mode)),
        }
    }
}

/// Owner, group and mode of a Unix socket's file, as configured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SocketAccess {
    /// Owner of the socket's file; `None` for the process's own user.
    pub owner: Option<Principal>,
    /// Group of the socket's file; `None` for the process's own group.
    pub group: Option<Principal>,
    /// Mode of the socket's file. If only a group is given, the group may connect, too.
    pub mode: Option<SocketMode>,
}

impl SocketAccess {
    /// Returns these options; an option that is not set has the value in `other`.
    #[must_use]
    pub fn or(&self, other: &Self) -> Self {
        Self {
            owner: self.owner.clone().or_else(|| other.owner.clone()),
            group: self.group.clone().or_else(|| other.group.clone()),
            mode: self.mode.or(other.mode),
        }
    }

    /// Converts the names of user and group to numbers.
    ///
    /// # Errors
    /// There is no such user or group.
    pub fn resolve(&self) -> Result<Access> {
        let owner = self.owner.as_ref().map(Principal::user);
        let group = self.group.as_ref().map(Principal::group);
        let access = Access {
            owner: owner.transpose().context("socket-owner")?,
            group: group.transpose().context("socket-group")?,
            mode: Mode::from_bits_truncate(self.effective_mode()),
        };
        Ok(access)
    }

    fn effective_mode(&self) -> u32 {
        let usual = match self.group {
            Some(_) => 0o660,
            None => 0o600,
        };
        self.mode.map_or(usual, |SocketMode(mode)| mode)
    }

    /// Returns whether `other` has the same effect. Users and groups have the same spelling then:
    /// inside the sandbox none can be looked up.
    pub fn is_same(&self, other: &Self) -> bool {
        self.owner == other.owner
            && self.group == other.group
            && self.effective_mode() == other.effective_mode()
    }

    /// Returns whether only the process's own user may connect, as by default.
    pub fn is_usual(&self) -> bool {
        let mode = self.mode.is_none_or(|SocketMode(mode)| mode == 0o600);
        self.owner.is_none() && self.group.is_none() && mode
    }

    /// Returns whether every user of the machine may connect to the socket.
    pub fn is_open_to_all(&self) -> bool {
        self.mode.is_some_and(|SocketMode(mode)| mode & 0o002 != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(text: &str) -> Result<SocketMode, &'static str> {
        text.parse()
    }

    #[test]
    fn socket_modes_are_octal_and_grant_access() {
        assert_eq!(mode("0660"), Ok(SocketMode(0o660)));
        assert_eq!(mode("660"), Ok(SocketMode(0o660)));
        assert_eq!(mode("0020"), Ok(SocketMode(0o020)));
        for text in [
            "999", "", "66", "1660", "4660", "+660", "0x1b0", "rw-", "00660", "-660",
        ] {
            assert!(mode(text).unwrap_err().contains("octal digits"), "{text}");
        }
        for text in ["000", "0444", "0555"] {
            assert!(
                mode(text).unwrap_err().contains("nobody could connect"),
                "{text}"
            );
        }
    }

    #[test]
    fn users_and_groups_are_parsed_by_name_or_number() {
        let named = |text: &str| text.parse::<Principal>().unwrap();
        assert_eq!(named("root").user().unwrap().as_raw(), 0);
        assert_eq!(named("root").group().unwrap().as_raw(), 0);
        // Whether somebody has it or not.
        assert_eq!(named("54321").user().unwrap().as_raw(), 54321);
        assert_eq!(named(" 54321 ").group().unwrap().as_raw(), 54321);
        let error = named("no-such-user-here").user().unwrap_err().to_string();
        assert!(
            error.starts_with("there is no user \"no-such-user-here\" on this machine; name one"),
            "{error}"
        );
        let error = named("no-such-group").group().unwrap_err().to_string();
        assert!(error.contains("no group"), "{error}");
        for text in ["4294967295", "4294967296", "99999999999999999999"] {
            assert!(named(text).user().is_err(), "{text}");
        }
        for text in ["", " ", "a:b", "../x", "a\0b"] {
            assert!(text.parse::<Principal>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn group_without_mode_gets_0660() {
        let group = SocketAccess {
            group: Some("0".parse().unwrap()),
            ..SocketAccess::default()
        };
        assert_eq!(group.resolve().unwrap().mode.bits(), 0o660);
        let narrow = SocketAccess {
            mode: Some(SocketMode(0o600)),
            ..SocketAccess::default()
        };
        assert_eq!(narrow.or(&group).resolve().unwrap().mode.bits(), 0o600);
        assert_eq!(narrow.or(&group).resolve().unwrap().group, Some(Gid::ROOT));
        let nothing = SocketAccess::default().resolve().unwrap();
        assert_eq!(nothing, Access::OWNER_ONLY);
    }
}
