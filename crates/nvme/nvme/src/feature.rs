//! Features, their values and data structures: NVMe Base 2.1, 5.1.25.
//!
//! The bitfields are the values of command dword 11 of Set Features and of
//! completion dword 0 of Get Features.

use bitfield_struct::bitfield;
use zerocopy::Unaligned;

use crate::log::CriticalWarning;
use crate::macros::open_values;

mod data;
mod placement;

pub use data::{HostBehavior, Timestamp, TimestampAttributes, TimestampOrigin};
pub use placement::{FdpEventDescriptor, FdpEventsCdw11, FdpMode};

open_values! {
    /// Feature Identifier (NVMe Base 2.1, figure 385).
    #[derive(Unaligned)]
    pub Fid: u8 {
        ARBITRATION = 0x01, "Arbitration";
        POWER_MANAGEMENT = 0x02, "Power Management";
        LBA_RANGE_TYPE = 0x03, "LBA Range Type";
        TEMPERATURE_THRESHOLD = 0x04, "Temperature Threshold";
        ERROR_RECOVERY = 0x05, "Error Recovery";
        VOLATILE_WRITE_CACHE = 0x06, "Volatile Write Cache";
        NUMBER_OF_QUEUES = 0x07, "Number of Queues";
        INTERRUPT_COALESCING = 0x08, "Interrupt Coalescing";
        INTERRUPT_VECTOR_CONFIG = 0x09, "Interrupt Vector Configuration";
        WRITE_ATOMICITY = 0x0a, "Write Atomicity Normal";
        ASYNC_EVENT_CONFIG = 0x0b, "Asynchronous Event Configuration";
        AUTONOMOUS_POWER_STATE_TRANSITION = 0x0c, "Autonomous Power State Transition";
        HOST_MEMORY_BUFFER = 0x0d, "Host Memory Buffer";
        TIMESTAMP = 0x0e, "Timestamp";
        KEEP_ALIVE_TIMER = 0x0f, "Keep Alive Timer";
        HOST_THERMAL_MANAGEMENT = 0x10, "Host Controlled Thermal Management";
        NON_OPERATIONAL_POWER_STATE_CONFIG = 0x11, "Non-Operational Power State Config";
        READ_RECOVERY_LEVEL_CONFIG = 0x12, "Read Recovery Level Config";
        PREDICTABLE_LATENCY_MODE_CONFIG = 0x13, "Predictable Latency Mode Config";
        PREDICTABLE_LATENCY_MODE_WINDOW = 0x14, "Predictable Latency Mode Window";
        LBA_STATUS_INFORMATION_ATTRIBUTES = 0x15, "LBA Status Information Attributes";
        HOST_BEHAVIOR_SUPPORT = 0x16, "Host Behavior Support";
        SANITIZE_CONFIG = 0x17, "Sanitize Config";
        ENDURANCE_GROUP_EVENT_CONFIG = 0x18, "Endurance Group Event Configuration";
        IO_COMMAND_SET_PROFILE = 0x19, "I/O Command Set Profile";
        SPINUP_CONTROL = 0x1a, "Spinup Control";
        POWER_LOSS_SIGNALING_CONFIG = 0x1b, "Power Loss Signaling Config";
        PERFORMANCE_CHARACTERISTICS = 0x1c, "Performance Characteristics";
        FLEXIBLE_DATA_PLACEMENT = 0x1d, "Flexible Data Placement";
        FDP_EVENTS = 0x1e, "Flexible Data Placement Events";
        NAMESPACE_ADMIN_LABEL = 0x1f, "Namespace Admin Label";
        KEY_VALUE_CONFIG = 0x20, "Key Value Configuration";
        CONTROLLER_DATA_QUEUE = 0x21, "Controller Data Queue";
        EMBEDDED_MANAGEMENT_CONTROLLER_ADDRESS = 0x78, "Embedded Management Controller Address";
        HOST_MANAGEMENT_AGENT_ADDRESS = 0x79, "Host Management Agent Address";
        ENHANCED_CONTROLLER_METADATA = 0x7d, "Enhanced Controller Metadata";
        CONTROLLER_METADATA = 0x7e, "Controller Metadata";
        NAMESPACE_METADATA = 0x7f, "Namespace Metadata";
        SOFTWARE_PROGRESS_MARKER = 0x80, "Software Progress Marker";
        HOST_IDENTIFIER = 0x81, "Host Identifier";
        RESERVATION_NOTIFICATION_MASK = 0x82, "Reservation Notification Mask";
        RESERVATION_PERSISTENCE = 0x83, "Reservation Persistence";
        NAMESPACE_WRITE_PROTECTION_CONFIG = 0x84, "Namespace Write Protection Config";
        BOOT_PARTITION_WRITE_PROTECTION_CONFIG = 0x85, "Boot Partition Write Protection Config";
    }
}

/// Value of [`Fid::NUMBER_OF_QUEUES`] (NVMe Base 2.1, 5.1.25.2.1): number of requested I/O queues
/// in dword 11, and of allocated ones in completion dword 0.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct NumberOfQueues {
    /// Number of I/O Submission Queues, zero-based; FFFFh is an invalid request.
    pub nsq_z: u16,
    /// Number of I/O Completion Queues, zero-based; FFFFh is an invalid request.
    pub ncq_z: u16,
}

/// Value of [`Fid::ASYNC_EVENT_CONFIG`] (NVMe Base 2.1, 5.1.25.1.5): asynchronous events that the
/// host has enabled.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct AsyncEventConfig {
    /// Critical warnings of the SMART log that cause events.
    #[bits(8)]
    pub smart: CriticalWarning,
    /// Enables Attached Namespace Attribute Notices.
    pub nan: bool,
    /// Enables Firmware Activation Notices.
    pub fan: bool,
    /// Enables Telemetry Log Notices.
    pub tln: bool,
    /// Enables ANA Change Notices.
    pub anacn: bool,
    /// Enables Predictable Latency Event Aggregate Log Change Notices.
    pub plealcn: bool,
    /// Enables LBA Status Information Alert Notices.
    pub lsian: bool,
    /// Enables Endurance Group Event Aggregate Log Change Notices.
    pub egealcn: bool,
    /// Enables the Normal NVM Subsystem Shutdown event.
    pub nnsshdn: bool,
    /// Enables the Temperature Threshold Hysteresis Recovery event.
    pub tthr: bool,
    /// Enables Reachability Association Notices.
    pub rassn: bool,
    /// Enables Reachability Group Notices.
    pub rgrp0: bool,
    /// Enables Allocated Namespace Attribute Notices.
    pub ansan: bool,
    #[bits(7)]
    __: u8,
    /// Enables Zone Descriptor Changed Notices.
    pub zdcn: bool,
    #[bits(3)]
    __: u8,
    /// Enables Discovery Log Page Change Notifications.
    pub dlpcn: bool,
}

/// Value of [`Fid::LBA_STATUS_INFORMATION_ATTRIBUTES`] (NVM Command Set 1.1, 4.1.3.5), in units of
/// 100 ms.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct LbaStatusAttributes {
    /// LBA Status Information Report Interval: minimum time from a read of the log page to the next
    /// alert.
    pub lsiri: u16,
    /// LBA Status Information Poll Interval: minimum time between reads of the log page by the
    /// host. The host cannot change it.
    pub lsipi: u16,
}

/// Value of [`Fid::RESERVATION_NOTIFICATION_MASK`] (NVMe Base 2.1, 5.1.25.1.29), namespace
/// specific: a set bit suppresses the log page of this kind of notification.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct ReservationNotificationMask {
    #[bits(1)]
    __: u8,
    /// Masks Registration Preempted notifications.
    pub regpre: bool,
    /// Masks Reservation Released notifications.
    pub resrel: bool,
    /// Masks Reservation Preempted notifications.
    pub respre: bool,
    #[bits(28)]
    __: u32,
}

/// Value of [`Fid::RESERVATION_PERSISTENCE`] (NVMe Base 2.1, 5.1.25.1.30); namespace specific.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct ReservationPersistence {
    /// Persist Through Power Loss: reservations survive a loss of power.
    pub ptpl: bool,
    #[bits(31)]
    __: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn feature_value_bits_encode() {
        let queues = NumberOfQueues::from_bits(0x0002_0003);
        assert_eq!((queues.nsq_z(), queues.ncq_z()), (3, 2));
        assert_eq!(AsyncEventConfig::new().with_nan(true).into_bits(), 1 << 8);
        assert_eq!(AsyncEventConfig::new().with_fan(true).into_bits(), 1 << 9);
        assert_eq!(AsyncEventConfig::new().with_tthr(true).into_bits(), 1 << 16);
        assert_eq!(
            AsyncEventConfig::new().with_ansan(true).into_bits(),
            1 << 19
        );
        assert_eq!(
            AsyncEventConfig::new().with_dlpcn(true).into_bits(),
            1 << 31
        );
    }
}
