//! Macros to declare wire types. Their layouts are checked at compile time; unknown values are kept
//! as data.

/// Declares a transparent newtype with a constant for each value that the standard names.
///
/// Any bit pattern is a valid value. `name()` returns the standard's name, if any. `Display` prints
/// the name or the number. With `from_bits` and `into_bits` the type can be a field of a bitfield.
macro_rules! open_values {
    (
        $(#[$meta:meta])*
        pub $name:ident: $repr:ty {
            $($constant:ident = $value:expr, $text:literal;)*
        }
    ) => {
        $(#[$meta])*
        #[derive(
            Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default,
            zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout,
        )]
        #[repr(transparent)]
        pub struct $name(pub $repr);

        impl $name {
            $(
                #[doc = concat!($text, ".")]
                pub const $constant: Self = Self($value);
            )*

            /// Creates a value from its bits.
            #[inline]
            pub const fn from_bits(bits: $repr) -> Self {
                Self(bits)
            }

            /// Returns the bits of the value.
            #[inline]
            pub const fn into_bits(self) -> $repr {
                self.0
            }

            /// Returns the standard's name of the value; `None` for a value that the standard does
            /// not define.
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $(value if value == $value => Some($text),)*
                    _ => None,
                }
            }
        }

        impl From<$repr> for $name {
            #[inline]
            fn from(bits: $repr) -> Self {
                Self(bits)
            }
        }

        impl From<$name> for $repr {
            #[inline]
            fn from(value: $name) -> Self {
                value.0
            }
        }

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match self.name() {
                    Some(name) => f.pad(name),
                    None => write!(f, "{:#04x}", self.0),
                }
            }
        }

        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match self.name() {
                    Some(name) => write!(f, "{}({:#04x}, {name})", stringify!($name), self.0),
                    None => write!(f, "{}({:#04x})", stringify!($name), self.0),
                }
            }
        }
    };
}

/// Checks size and field offsets of a wire type at compile time, against the standard's tables.
macro_rules! wire_layout {
    ($type:ty, $size:literal $(, $($field:ident @ $offset:literal),+)? $(,)?) => {
        const _: () = assert!(core::mem::size_of::<$type>() == $size);
        const _: () = assert!(core::mem::align_of::<$type>() == 1);
        $($(const _: () = assert!(core::mem::offset_of!($type, $field) == $offset);)+)?
    };
}

/// Implements `Default` as all zeroes, for types with arrays too long for the derive.
macro_rules! zeroed_default {
    ($($type:ty),+ $(,)?) => {
        $(impl Default for $type {
            fn default() -> Self {
                zerocopy::FromZeros::new_zeroed()
            }
        })+
    };
}

/// Declares a wire structure with alignment 1. Its size in bytes and the offset of each field are
/// checked at compile time. With `zeroed` its `Default` is all zeroes, for types with arrays too
/// long for the derive, and it is not `Copy`.
macro_rules! wire_struct {
    (
        $(#[$meta:meta])*
        pub struct $name:ident($size:literal) $fields:tt
    ) => {
        crate::macros::wire_struct! {
            $(#[$meta])*
            #[derive(Copy, Default)]
            pub struct $name($size, declared) $fields
        }
    };
    (
        $(#[$meta:meta])*
        pub struct $name:ident($size:literal, zeroed) $fields:tt
    ) => {
        crate::macros::wire_struct! {
            $(#[$meta])*
            pub struct $name($size, declared) $fields
        }

        impl Default for $name {
            fn default() -> Self {
                zerocopy::FromZeros::new_zeroed()
            }
        }
    };
    (
        $(#[$meta:meta])*
        pub struct $name:ident($size:literal, declared) {
            $($(#[$field_meta:meta])* $vis:vis $field:ident @ $offset:literal: $type:ty,)*
        }
    ) => {
        $(#[$meta])*
        #[derive(
            Clone, Debug, PartialEq, Eq, zerocopy::FromBytes, zerocopy::IntoBytes,
            zerocopy::Immutable, zerocopy::KnownLayout, zerocopy::Unaligned,
        )]
        #[repr(C)]
        pub struct $name {
            $($(#[$field_meta])* $vis $field: $type,)*
        }

        crate::macros::wire_layout!($name, $size, $($field @ $offset),*);
    };
}

pub(crate) use {open_values, wire_layout, wire_struct, zeroed_default};
