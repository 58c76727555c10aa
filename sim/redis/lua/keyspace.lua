-- The keys of one server, their kinds and their expiry, and numbers as Redis reads and writes them.
local parts = ...

local find, format, getinfo = string.find, string.format, debug.getinfo
local huge, pairs, tonumber, type = math.huge, pairs, tonumber, type

-- Whole numbers are exact up to here; Redis counts in 64 bits, which no script of ours comes near.
local EXACT = 2 ^ 53 - 1

-- Ends the command at hand with an error answer. A script that runs is told the line it was at.
function parts.fail(message)
  local level, at = 2, getinfo(2, 'Sl')
  while at and at.source ~= '@user_script' do
    level = level + 1
    at = getinfo(level, 'Sl')
  end
  error({err = message, line = at and at.currentline}, 0)
end
local fail = parts.fail

-- What this server does not have: no answer of Redis, so that nobody takes it for one.
function parts.missing(what) error({missing = what}, 0) end

function parts.keyspace()
  -- Keys that expire, in the order in which they were written: mostly that in which they end.
  return {keys = {}, scripts = {}, ending = {}, first = 1, last = 0, now_ms = 0, micros = 0}
end

local function copied(value, known)
  if type(value) ~= 'table' then return value end
  if known[value] then return known[value] end
  local copy = {}
  known[value] = copy
  for key, inner in pairs(value) do copy[key] = copied(inner, known) end
  return copy
end

-- What a server would have after a restart: its keys, and no scripts.
function parts.copied(space)
  return copied(space, {[space.scripts] = {}})
end

-- The value under a key if it is of that kind; nothing if there is none.
function parts.value(space, key, kind)
  local value = space.keys[key]
  if not value then return nil end
  if value.ends_ms and value.ends_ms < space.now_ms then
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
  return value ~= nil and not (value.ends_ms and value.ends_ms < space.now_ms)
end

function parts.expire(space, key, value, ends_ms)
  value.ends_ms = ends_ms
  space.last = space.last + 1
  space.ending[space.last] = {key, value}
end

-- Frees what has expired. One that ends later than what was written after it holds those up: they
-- are gone for who looks, and are freed later.
function parts.sweep(space)
  local first, ending, now_ms = space.first, space.ending, space.now_ms
  while first <= space.last and ending[first][2].ends_ms < now_ms do
    local key, value = ending[first][1], ending[first][2]
    if space.keys[key] == value then space.keys[key] = nil end
    ending[first] = nil
    first = first + 1
  end
  space.first = first
end

-- Redis' reading of a whole number, or the failure that says `complaint`.
function parts.whole(text, complaint)
  local number = find(text, '^-?[1-9]%d*$') and tonumber(text) or text == '0' and 0
  if not number then fail(complaint or 'ERR value is not an integer or out of range') end
  if number > EXACT or number < -EXACT then parts.missing('whole numbers beyond 2^53') end
  return number
end

function parts.decimal(text, complaint)
  local number = not find(text, '^%s') and tonumber(text)
  if not number or number ~= number then fail(complaint) end
  return number
end

-- Redis 7.0's text of a number that a script passes.
function parts.text(number)
  if number == huge then return 'inf' end
  if number == -huge then return '-inf' end
  return format('%.17g', number)
end

-- The text under a counter that goes on by `by`.
function parts.counted(before, by)
  if before + by > EXACT or before + by < -EXACT then parts.missing('counts beyond 2^53') end
  return format('%.0f', before + by)
end

-- command name -> {run, arity as Redis states it, writes, needs memory, is not for scripts}
parts.commands = {}

function parts.command(name, arity, flags, run)
  parts.commands[name] = {
    run = run, arity = arity, writes = find(flags, 'w') ~= nil, grows = find(flags, 'm') ~= nil,
    outside = find(flags, 'o') ~= nil,
  }
end
