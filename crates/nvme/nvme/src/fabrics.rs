//! Fabrics commands and their data (NVMe Base 2.1, 6).
//!
//! All of them have the opcode [`AdminOpcode::FABRICS`](crate::AdminOpcode::FABRICS), on any queue.
//! The command type (FCTYPE, the first byte of the NSID field) distinguishes them:
//!
//! ```
//! use nvme::fabrics::{self, Connect, Fctype};
//!
//! let connect = Connect { qid: 1, sqsize_z: 127, ..Connect::default() };
//! let command = connect.command(7);
//! assert_eq!(fabrics::fctype(&command), Some(Fctype::CONNECT));
//! assert_eq!(Connect::from_command(&command), connect);
//! ```

use bitfield_struct::bitfield;
use zerocopy::Unaligned;
use zerocopy::little_endian::U16;

use crate::cmd::{AdminOpcode, Command};
use crate::identify::Nqn;
use crate::macros::{open_values, wire_struct};
use crate::sgl::SglDescriptor;
use crate::status::StatusCodeType;
use crate::{Completion, Status};

/// NQN of the discovery subsystem (NVMe Base 2.1, 4.7).
pub const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";
/// CNTLID of a Connect command that lets the subsystem choose a controller (dynamic controller
/// model).
pub const CNTLID_DYNAMIC: u16 = 0xffff;
/// SQHD of the response to Connect when submission queue flow control is disabled.
pub const SQHD_NO_FLOW_CONTROL: u16 = 0xffff;
/// Size of the data of Connect in bytes.
pub const CONNECT_DATA_LEN: u32 = 1024;

open_values! {
    /// Fabrics Command Type (NVMe Base 2.1, 6, figure 542).
    #[derive(Unaligned)]
    pub Fctype: u8 {
        PROPERTY_SET = 0x00, "Property Set";
        CONNECT = 0x01, "Connect";
        PROPERTY_GET = 0x04, "Property Get";
        AUTHENTICATION_SEND = 0x05, "Authentication Send";
        AUTHENTICATION_RECEIVE = 0x06, "Authentication Receive";
        DISCONNECT = 0x08, "Disconnect";
    }
}

/// Returns the Fabrics Command Type; `None` for a command that is no Fabrics command.
pub const fn fctype(command: &Command) -> Option<Fctype> {
    match command.admin_opcode() {
        AdminOpcode::FABRICS => Some(Fctype(command.nsid.get() as u8)),
        _ => None,
    }
}

/// Creates a Fabrics command of this type in which all other fields are zero. The data pointer is
/// an SGL.
fn command(fctype: Fctype, cid: u16) -> Command {
    let mut command = Command::new(AdminOpcode::FABRICS.0, cid, fctype.0.into());
    command.set_sgl(SglDescriptor::default());
    command
}

/// Status codes of Fabrics commands. The NVM command set and [`Status::name`] use the same numbers
/// for other errors.
pub mod status {
    use super::{Status, StatusCodeType};

    const fn code(sc: u8) -> Status {
        Status::code(StatusCodeType::COMMAND_SPECIFIC, sc)
    }

    /// Connect Incompatible Format: the record format (RECFMT) is not supported.
    pub const CONNECT_INCOMPATIBLE_FORMAT: Status = code(0x80);
    /// Connect Controller Busy: the controller already has an association.
    pub const CONNECT_CONTROLLER_BUSY: Status = code(0x81);
    /// Connect Invalid Parameters. The response contains the parameter's location
    /// ([`super::InvalidParameter`]).
    pub const CONNECT_INVALID_PARAMETERS: Status = code(0x82);
    /// Connect Invalid Host: the host is not allowed to connect.
    pub const CONNECT_INVALID_HOST: Status = code(0x84);
    /// Invalid Queue Type: Disconnect was sent on the Admin queue.
    pub const INVALID_QUEUE_TYPE: Status = code(0x85);
    /// Authentication Required: the host has to authenticate before other commands.
    pub const AUTHENTICATION_REQUIRED: Status = code(0x91);

    /// Returns the standard's name for the status of a Fabrics command, otherwise [`Status::name`].
    pub const fn name(status: Status) -> Option<&'static str> {
        match (status.sct(), status.sc()) {
            (StatusCodeType::COMMAND_SPECIFIC, 0x80) => Some("Connect Incompatible Format"),
            (StatusCodeType::COMMAND_SPECIFIC, 0x81) => Some("Connect Controller Busy"),
            (StatusCodeType::COMMAND_SPECIFIC, 0x82) => Some("Connect Invalid Parameters"),
            (StatusCodeType::COMMAND_SPECIFIC, 0x83) => Some("Connect Restart Discovery"),
            (StatusCodeType::COMMAND_SPECIFIC, 0x84) => Some("Connect Invalid Host"),
            (StatusCodeType::COMMAND_SPECIFIC, 0x85) => Some("Invalid Queue Type"),
            (StatusCodeType::COMMAND_SPECIFIC, 0x90) => Some("Discover Restart"),
            (StatusCodeType::COMMAND_SPECIFIC, 0x91) => Some("Authentication Required"),
            _ => status.name(),
        }
    }
}

/// Connect Attributes (CATTR).
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct Cattr {
    /// Priority class of the queue.
    #[bits(2)]
    pub prio: u8,
    /// Disable SQ Flow Control.
    pub dsqfc: bool,
    /// Individual I/O Queue Deletion Support.
    pub iiods: bool,
    #[bits(4)]
    __: u8,
}

/// Arguments of Connect (NVMe Base 2.1, 6.3), which creates a queue pair. The data of the command
/// is [`ConnectData`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Connect {
    /// Record Format, 0.
    pub recfmt: u16,
    /// Queue Identifier; 0 for the Admin queue.
    pub qid: u16,
    /// Submission Queue Size in entries, zero-based.
    pub sqsize_z: u16,
    /// Connect Attributes.
    pub cattr: Cattr,
    /// Keep Alive Timeout in milliseconds; 0 for none. Only used for the Admin queue.
    pub kato: u32,
}

impl Connect {
    /// Creates the command. The caller adds the descriptor of its data.
    pub fn command(&self, cid: u16) -> Command {
        let mut command = command(Fctype::CONNECT, cid);
        command.cdw10 = (u32::from(self.recfmt) | u32::from(self.qid) << 16).into();
        let cattr = u32::from(self.cattr.into_bits());
        command.cdw11 = (u32::from(self.sqsize_z) | cattr << 16).into();
        command.cdw12 = self.kato.into();
        command
    }

    /// Returns the arguments from a command's dwords.
    pub const fn from_command(command: &Command) -> Self {
        let (cdw10, cdw11) = (command.cdw10.get(), command.cdw11.get());
        Self {
            recfmt: cdw10 as u16,
            qid: (cdw10 >> 16) as u16,
            sqsize_z: cdw11 as u16,
            cattr: Cattr::from_bits((cdw11 >> 16) as u8),
            kato: command.cdw12.get(),
        }
    }
}

wire_struct! {
    /// Data of Connect, 1024 bytes (NVMe Base 2.1, 6.3, figure 546).
    pub struct ConnectData(1024, zeroed) {
        /// Host Identifier.
        pub hostid @ 0: [u8; 16],
        /// Controller ID; [`CNTLID_DYNAMIC`] lets the subsystem choose.
        pub cntlid @ 16: U16,
        #[doc(hidden)]
        pub reserved18 @ 18: [u8; 238],
        /// NVM Subsystem NQN.
        pub subnqn @ 256: Nqn,
        /// Host NQN.
        pub hostnqn @ 512: Nqn,
        #[doc(hidden)]
        pub reserved768 @ 768: [u8; 256],
    }
}

/// Dword 0 of the response to a successful Connect.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Connected {
    /// Controller ID.
    pub cntlid: u16,
    #[bits(1)]
    __: u8,
    /// Authentication Transaction Required: only authentication is allowed before it has succeeded.
    pub atr: bool,
    /// Authentication and Secure Channel Required.
    pub ascr: bool,
    #[bits(13)]
    __: u16,
}

/// Dword 0 of the response to a Connect that failed with Connect Invalid Parameters.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct InvalidParameter {
    /// Invalid Parameter Offset, in bytes.
    pub ipo: u16,
    /// Whether the offset is into the data instead of the command.
    pub iattr: bool,
    #[bits(15)]
    __: u16,
}

/// Arguments of Property Get or Property Set (NVMe Base 2.1, 6.6 and 6.7), which access a
/// controller register.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Property {
    /// Whether the register has 8 bytes instead of 4.
    pub is_64_bits: bool,
    /// Whether the command requests a size other than 4 and 8 bytes.
    pub is_other: bool,
    /// Offset of the register.
    pub offset: u32,
    /// Value to write, for Property Set.
    pub value: u64,
}

impl Property {
    /// Creates a command that reads a register. Dwords 0 and 1 of the response contain the value.
    pub fn get(cid: u16, offset: u32, is_64_bits: bool) -> Command {
        let mut command = command(Fctype::PROPERTY_GET, cid);
        command.cdw10 = u32::from(is_64_bits).into();
        command.cdw11 = offset.into();
        command
    }

    /// Creates a command that writes a 4-byte register.
    pub fn set(cid: u16, offset: u32, value: u32) -> Command {
        let mut command = command(Fctype::PROPERTY_SET, cid);
        command.cdw11 = offset.into();
        command.cdw12 = value.into();
        command
    }

    /// Returns the arguments from a command's dwords.
    pub const fn from_command(command: &Command) -> Self {
        let size = command.cdw10.get() & 7;
        Self {
            is_64_bits: size == 1,
            is_other: size > 1,
            offset: command.cdw11.get(),
            value: (command.cdw13.get() as u64) << 32 | command.cdw12.get() as u64,
        }
    }
}

/// Returns the register value from the response to Property Get.
pub const fn property(entry: &Completion) -> u64 {
    (entry.dw1.get() as u64) << 32 | entry.dw0.get() as u64
}

/// Arguments of Authentication Send or Receive (NVMe Base 2.1, 6.1 and 6.2). The protocol for NVMe
/// (DH-HMAC-CHAP) has SECP E9h, SPSP0 01h and SPSP1 01h.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Authentication {
    /// Security Protocol.
    pub secp: u8,
    /// SP Specific: two bytes, the first one in the lower byte.
    pub spsp: u16,
    /// Length of the message in bytes, or of the buffer to receive one.
    pub len: u32,
}

impl Authentication {
    /// Creates the arguments for an NVMe authentication message of `len` bytes.
    pub const fn nvme(len: u32) -> Self {
        Self {
            secp: 0xe9,
            spsp: 0x0101,
            len,
        }
    }

    /// Returns whether the security protocol is the one for NVMe.
    pub const fn is_nvme(&self) -> bool {
        self.secp == 0xe9 && self.spsp == 0x0101
    }

    /// Creates a command that sends an authentication message to the controller.
    pub fn send(&self, cid: u16) -> Command {
        self.command(Fctype::AUTHENTICATION_SEND, cid)
    }

    /// Creates a command that requests an authentication message from the controller.
    pub fn receive(&self, cid: u16) -> Command {
        self.command(Fctype::AUTHENTICATION_RECEIVE, cid)
    }

    fn command(&self, fctype: Fctype, cid: u16) -> Command {
        let mut command = command(fctype, cid);
        let [spsp0, spsp1] = self.spsp.to_le_bytes();
        command.cdw10 = u32::from_le_bytes([0, spsp0, spsp1, self.secp]).into();
        command.cdw11 = self.len.into();
        command
    }

    /// Returns the arguments from a command's dwords.
    pub const fn from_command(command: &Command) -> Self {
        let [_, spsp0, spsp1, secp] = command.cdw10.get().to_le_bytes();
        Self {
            secp,
            spsp: u16::from_le_bytes([spsp0, spsp1]),
            len: command.cdw11.get(),
        }
    }
}

/// Creates Disconnect (NVMe Base 2.1, 6.4), which deletes the I/O queue that it is sent on.
pub fn disconnect(cid: u16) -> Command {
    command(Fctype::DISCONNECT, cid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    /// Checks byte offsets against the standard's figures and Linux.
    #[test]
    fn connect_matches_wire_layout() {
        let connect = Connect {
            recfmt: 0,
            qid: 0x0102,
            sqsize_z: 0x0304,
            cattr: Cattr::new().with_dsqfc(true),
            kato: 0x0506_0708,
        };
        let command = connect.command(0x1122);
        let bytes = command.as_bytes();
        assert_eq!(bytes[..8], [0x7f, 0x40, 0x22, 0x11, 1, 0, 0, 0]);
        assert_eq!(bytes[40..52], [0, 0, 2, 1, 4, 3, 4, 0, 8, 7, 6, 5]);
        assert_eq!(Connect::from_command(&command), connect);
        assert_eq!(fctype(&command), Some(Fctype::CONNECT));
        assert_eq!(fctype(&Command::new(6, 0, 1)), None);
    }

    #[test]
    fn connect_results_encode() {
        let connected = Connected::from_bits(0x0006_1234);
        assert_eq!(connected.cntlid(), 0x1234);
        assert!(connected.atr() && connected.ascr());
        let wrong = InvalidParameter::new().with_ipo(256).with_iattr(true);
        assert_eq!(wrong.into_bits(), 0x0001_0100);
    }

    #[test]
    fn properties_match_wire_layout() {
        let get = Property::get(1, 0, true);
        assert_eq!(get.as_bytes()[4], 4);
        assert_eq!(get.as_bytes()[40..48], [1, 0, 0, 0, 0, 0, 0, 0]);
        assert!(Property::from_command(&get).is_64_bits);
        let set = Property::set(1, 0x14, 0x0046_0001);
        assert_eq!(set.as_bytes()[4], 0);
        let bytes = &set.as_bytes()[40..56];
        let expected = [0, 0, 0, 0, 0x14, 0, 0, 0, 1, 0, 0x46, 0, 0, 0, 0, 0];
        assert_eq!(bytes, expected);
        let read = Property::from_command(&set);
        assert_eq!((read.offset, read.value), (0x14, 0x0046_0001));
        assert!(!read.is_64_bits && !read.is_other);
        let mut other = set;
        other.cdw10 = 2.into();
        assert!(Property::from_command(&other).is_other);
        let entry = Completion {
            dw0: 1.into(),
            dw1: 2.into(),
            ..Completion::default()
        };
        assert_eq!(property(&entry), 2 << 32 | 1);
    }

    #[test]
    fn authentication_matches_wire_layout() {
        let message = Authentication::nvme(0x1234);
        let command = message.send(3);
        assert_eq!(command.as_bytes()[4], 5);
        let bytes = &command.as_bytes()[40..48];
        assert_eq!(bytes, [0, 1, 1, 0xe9, 0x34, 0x12, 0, 0]);
        assert!(Authentication::from_command(&command).is_nvme());
        assert_eq!(Authentication::from_command(&command), message);
        assert_eq!(message.receive(3).as_bytes()[4], 6);
        assert_eq!(disconnect(3).as_bytes()[4], 8);
    }

    #[test]
    fn fabrics_statuses_have_names() {
        let name = status::name(status::CONNECT_INVALID_HOST);
        assert_eq!(name, Some("Connect Invalid Host"));
        assert_eq!(
            status::name(Status::INVALID_FIELD),
            Status::INVALID_FIELD.name()
        );
    }
}
