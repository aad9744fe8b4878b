//! Opcodes: NVMe Base 2.1, 5 (Admin) and 7 (I/O); NVM Command Set 1.1, 3.

use zerocopy::Unaligned;

use crate::macros::open_values;

open_values! {
    /// Opcode of an Admin command.
    #[derive(Unaligned)]
    pub AdminOpcode: u8 {
        DELETE_IO_SQ = 0x00, "Delete I/O Submission Queue";
        CREATE_IO_SQ = 0x01, "Create I/O Submission Queue";
        GET_LOG_PAGE = 0x02, "Get Log Page";
        DELETE_IO_CQ = 0x04, "Delete I/O Completion Queue";
        CREATE_IO_CQ = 0x05, "Create I/O Completion Queue";
        IDENTIFY = 0x06, "Identify";
        ABORT = 0x08, "Abort";
        SET_FEATURES = 0x09, "Set Features";
        GET_FEATURES = 0x0a, "Get Features";
        ASYNC_EVENT_REQUEST = 0x0c, "Asynchronous Event Request";
        NAMESPACE_MANAGEMENT = 0x0d, "Namespace Management";
        FIRMWARE_COMMIT = 0x10, "Firmware Commit";
        FIRMWARE_IMAGE_DOWNLOAD = 0x11, "Firmware Image Download";
        DEVICE_SELF_TEST = 0x14, "Device Self-test";
        NAMESPACE_ATTACHMENT = 0x15, "Namespace Attachment";
        KEEP_ALIVE = 0x18, "Keep Alive";
        DIRECTIVE_SEND = 0x19, "Directive Send";
        DIRECTIVE_RECEIVE = 0x1a, "Directive Receive";
        VIRTUALIZATION_MANAGEMENT = 0x1c, "Virtualization Management";
        NVME_MI_SEND = 0x1d, "NVMe-MI Send";
        NVME_MI_RECEIVE = 0x1e, "NVMe-MI Receive";
        CAPACITY_MANAGEMENT = 0x20, "Capacity Management";
        DISCOVERY_INFORMATION_MANAGEMENT = 0x21, "Discovery Information Management";
        FABRIC_ZONING_RECEIVE = 0x22, "Fabric Zoning Receive";
        LOCKDOWN = 0x24, "Lockdown";
        FABRIC_ZONING_LOOKUP = 0x25, "Fabric Zoning Lookup";
        CLEAR_EXPORTED_NVM_RESOURCE_CONFIG = 0x28, "Clear Exported NVM Resource Configuration";
        FABRIC_ZONING_SEND = 0x29, "Fabric Zoning Send";
        CREATE_EXPORTED_NVM_SUBSYSTEM = 0x2a, "Create Exported NVM Subsystem";
        MANAGE_EXPORTED_NVM_SUBSYSTEM = 0x2d, "Manage Exported NVM Subsystem";
        MANAGE_EXPORTED_NAMESPACE = 0x31, "Manage Exported Namespace";
        MANAGE_EXPORTED_PORT = 0x35, "Manage Exported Port";
        SEND_DISCOVERY_LOG_PAGE = 0x39, "Send Discovery Log Page";
        TRACK_SEND = 0x3d, "Track Send";
        TRACK_RECEIVE = 0x3e, "Track Receive";
        MIGRATION_SEND = 0x41, "Migration Send";
        MIGRATION_RECEIVE = 0x42, "Migration Receive";
        CONTROLLER_DATA_QUEUE = 0x45, "Controller Data Queue";
        DOORBELL_BUFFER_CONFIG = 0x7c, "Doorbell Buffer Config";
        FABRICS = 0x7f, "Fabrics Commands";
        FORMAT_NVM = 0x80, "Format NVM";
        SECURITY_SEND = 0x81, "Security Send";
        SECURITY_RECEIVE = 0x82, "Security Receive";
        SANITIZE = 0x84, "Sanitize";
        LOAD_PROGRAM = 0x85, "Load Program";
        GET_LBA_STATUS = 0x86, "Get LBA Status";
        PROGRAM_ACTIVATION_MANAGEMENT = 0x88, "Program Activation Management";
        MEMORY_RANGE_SET_MANAGEMENT = 0x89, "Memory Range Set Management";
    }
}

open_values! {
    /// Opcode of an I/O command of the NVM or the Zoned Namespace command set.
    #[derive(Unaligned)]
    pub NvmOpcode: u8 {
        FLUSH = 0x00, "Flush";
        WRITE = 0x01, "Write";
        READ = 0x02, "Read";
        WRITE_UNCORRECTABLE = 0x04, "Write Uncorrectable";
        COMPARE = 0x05, "Compare";
        WRITE_ZEROES = 0x08, "Write Zeroes";
        DATASET_MANAGEMENT = 0x09, "Dataset Management";
        VERIFY = 0x0c, "Verify";
        RESERVATION_REGISTER = 0x0d, "Reservation Register";
        RESERVATION_REPORT = 0x0e, "Reservation Report";
        RESERVATION_ACQUIRE = 0x11, "Reservation Acquire";
        IO_MANAGEMENT_RECEIVE = 0x12, "I/O Management Receive";
        RESERVATION_RELEASE = 0x15, "Reservation Release";
        CANCEL = 0x18, "Cancel";
        COPY = 0x19, "Copy";
        IO_MANAGEMENT_SEND = 0x1d, "I/O Management Send";
        ZONE_MANAGEMENT_SEND = 0x79, "Zone Management Send";
        ZONE_MANAGEMENT_RECEIVE = 0x7a, "Zone Management Receive";
        ZONE_APPEND = 0x7d, "Zone Append";
    }
}

open_values! {
    /// Data transfer direction, encoded in bits 1:0 of every opcode (NVMe Base 2.1, 4.1.1).
    pub DataTransfer: u8 {
        NONE = 0, "No data transfer";
        HOST_TO_CONTROLLER = 1, "Host to controller";
        CONTROLLER_TO_HOST = 2, "Controller to host";
        BIDIRECTIONAL = 3, "Bidirectional";
    }
}

impl AdminOpcode {
    /// Returns the data transfer direction that the opcode encodes.
    pub const fn data_transfer(self) -> DataTransfer {
        DataTransfer(self.0 & 3)
    }
}

impl NvmOpcode {
    /// Returns the data transfer direction that the opcode encodes.
    pub const fn data_transfer(self) -> DataTransfer {
        DataTransfer(self.0 & 3)
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use std::{format, string::ToString};

    use super::*;

    #[test]
    fn unknown_opcodes_have_no_name() {
        assert_eq!(AdminOpcode(0xc5).name(), None);
        assert_eq!(AdminOpcode(0xc5).to_string(), "0xc5");
        assert_eq!(AdminOpcode::from_bits(0xc5).into_bits(), 0xc5);
        assert_eq!(format!("{:?}", NvmOpcode::READ), "NvmOpcode(0x02, Read)");
        assert_eq!(format!("{:>6}", NvmOpcode::READ), "  Read");
    }

    #[test]
    fn opcodes_encode_data_direction() {
        assert_eq!(
            NvmOpcode::READ.data_transfer(),
            DataTransfer::CONTROLLER_TO_HOST
        );
        assert_eq!(
            NvmOpcode::WRITE.data_transfer(),
            DataTransfer::HOST_TO_CONTROLLER
        );
        assert_eq!(
            NvmOpcode::COMPARE.data_transfer(),
            DataTransfer::HOST_TO_CONTROLLER
        );
        assert_eq!(NvmOpcode::WRITE_ZEROES.data_transfer(), DataTransfer::NONE);
        assert_eq!(
            AdminOpcode::IDENTIFY.data_transfer(),
            DataTransfer::CONTROLLER_TO_HOST
        );
        assert_eq!(
            AdminOpcode::DOORBELL_BUFFER_CONFIG.data_transfer(),
            DataTransfer::NONE
        );
    }
}
