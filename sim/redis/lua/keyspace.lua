-- Keys of one server with their kinds and expiry, and Redis' parsing and formatting of numbers.
local parts = ...

local find, format, getinfo = string.find, string.format, debug.getinfo
local huge, pairs, tonumber, type = math.huge, pairs, tonumber, type

-- Largest exact integer of a double. Redis has 64 bits, but our scripts need no larger numbers.
local EXACT = 2 ^ 53 - 1

-- Ends the current command with an error reply. In a script, the error includes the line number.
function parts.fail(message)
  local level, at = 2, getinfo(2, 'Sl')
  while at and at.source ~= '@user_script' do
    level = level + 1
    at = getinfo(level, 'Sl')
  end
  error({err = message, line = at and at.currentline}, 0)
end
local fail = parts.fail

-- Raises an error for a feature that this server lacks. It differs from all replies of Redis.
function parts.fail_unsupported(what) error({unsupported = what}, 0) end

function parts.keyspace()
  -- `expiring`: keys with an expiry in write order, which is mostly the order of expiry.
  return {keys = {}, scripts = {}, expiring = {}, first = 1, last = 0, now_ms = 0, micros = 0}
end

local function copy_state(value, known)
  if type(value) ~= 'table' then return value end
  if known[value] then return known[value] end
  local copy = {}
  known[value] = copy
  for key, inner in pairs(value) do copy[key] = copy_state(inner, known) end
  return copy
end

-- Returns the state of a server after a restart: its keys without scripts.
function parts.copy_state(space)
  return copy_state(space, {[space.scripts] = {}})
end

-- Returns the value of a key, or nil if there is none; fails if it has another kind.
function parts.value(space, key, kind)
  local value = space.keys[key]
  if not value then return nil end
  if value.expires_ms and value.expires_ms < space.now_ms then
    space.keys[key] = nil
    return nil
  end
  if value.kind ~= kind then
    fail('WRONGTYPE Operation against a key holding the wrong kind of value')
  end
  return value
end

function parts.exists(space, key)
  local value = space.keys[key]
  return value ~= nil and not (value.expires_ms and value.expires_ms < space.now_ms)
end

function parts.expire(space, key, value, expires_ms)
  value.expires_ms = expires_ms
  space.last = space.last + 1
  space.expiring[space.last] = {key, value}
end

-- Frees expired keys at the front of the queue. A key that expires late delays the release of the
-- keys behind it; reads already treat those as expired.
function parts.sweep(space)
  local first, expiring, now_ms = space.first, space.expiring, space.now_ms
  while first <= space.last and expiring[first][2].expires_ms < now_ms do
    local key, value = expiring[first][1], expiring[first][2]
    if space.keys[key] == value then space.keys[key] = nil end
    expiring[first] = nil
    first = first + 1
  end
  space.first = first
end

-- Parses an integer as Redis does; fails with `complaint` if the text is not an integer.
function parts.parse_integer(text, complaint)
  local number = find(text, '^-?[1-9]%d*$') and tonumber(text) or text == '0' and 0
  if not number then fail(complaint or 'ERR value is not an integer or out of range') end
  if number > EXACT or number < -EXACT then parts.fail_unsupported('whole numbers beyond 2^53') end
  return number
end

function parts.parse_float(text, complaint)
  local number = not find(text, '^%s') and tonumber(text)
  if not number or number ~= number then fail(complaint) end
  return number
end

-- Formats a number argument of a script as Redis 7.0 does.
function parts.format_number(number)
  if number == huge then return 'inf' end
  if number == -huge then return '-inf' end
  return format('%.17g', number)
end

-- Returns `before` + `by` as the text of a counter.
function parts.add_to_counter(before, by)
  local sum = before + by
  if sum > EXACT or sum < -EXACT then parts.fail_unsupported('counts beyond 2^53') end
  return format('%.0f', sum)
end

-- command name -> {run, arity as in Redis, writes, grows: needs memory, outside: not in scripts}
parts.commands = {}

function parts.command(name, arity, flags, run)
  parts.commands[name] = {
    run = run, arity = arity, writes = find(flags, 'w') ~= nil, grows = find(flags, 'm') ~= nil,
    outside = find(flags, 'o') ~= nil,
  }
end
